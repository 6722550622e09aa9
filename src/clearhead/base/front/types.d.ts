// The types that the pages share.

/** A part of the tree of a step, see `language.js`. */
export type Tree = NameTree | ValueTree | CallTree;
export interface NameTree { kind: "name"; name: string }
export interface ValueTree { kind: "value"; value: Constant | boolean; text: string | null }
export interface CallTree { kind: "call"; name: string; inputs: Tree[]; options: Record<string, Tree> }

/** The content of a value in a tree: a number, a type or "..." as text, or an entry of an index. */
export type Constant = number | string | number[] | Range;
export interface Range { from?: number; to?: number; by?: number }

/** An axis: `n` entries that the page holds, and `more` that it does not hold. */
export interface Extent { n: number; more: number }

/** A piece of a number that is written out: text, or a number of a step, where it stands. */
export type Piece = string | Source;
export interface Source { text: string; step: string; index: number[] }
export interface Term { binds: number; pieces: Piece[] }

/** The result of an operation, entry by entry. */
export interface Computed { axes: Extent[]; at(index: number[]): number; term(index: number[]): Term }

/** A value of a tree, which is not always a number. */
export interface ConstantNode { axes: Extent[]; at(index: number[]): Constant; term(index: number[]): Term }

/** An input of an operation: numbers, a constant, or a list of these. */
export type Given = Computed | ConstantNode | Given[];

/** A step, of which others read the node. */
export interface Named { node: Computed }

/** 256 colours, three bytes each. */
export type Table = Uint8ClampedArray;
