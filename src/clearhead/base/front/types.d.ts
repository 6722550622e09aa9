// The types that the pages share.

/** A part of the code of a step, see `language.js`. */
export type Tree = NameTree | ValueTree | CallTree;
export interface NameTree { kind: "name"; name: string }
export interface ValueTree { kind: "value"; value: Constant; text: string | null }
export interface CallTree { kind: "call"; name: string; inputs: Tree[]; options: Record<string, Tree> }

/** What a value of the code is: a number, a type or "..." as text, what an index takes. */
export type Constant = number | string | undefined | (number | undefined)[] | Range;
export interface Range { from?: number; to?: number; by?: number }

/** An axis of `n` entries that the page holds; `more`, those that it does not. */
export interface Extent { n: number; more: number }

/** A piece of a number that is written out: text, or a number of a step, where it stands. */
export type Piece = string | Source;
export interface Source { text: string; step: string; index: number[] }
export interface Term { binds: number; pieces: Piece[] }

/** What an operation computes, entry by entry. */
export interface Computed { axes: Extent[]; at(index: number[]): number; term(index: number[]): Term }

/** A value of the code, which is not always a number. */
export interface ConstantNode { axes: Extent[]; at(index: number[]): Constant; term(index: number[]): Term }

/** What an operation is given: numbers, a constant, or a list of them. */
export type Given = Computed | ConstantNode | Given[];

/** A step, of which others read the node. */
export interface Named { node: Computed }

/** 256 colours, three bytes each. */
export type Table = Uint8ClampedArray;
