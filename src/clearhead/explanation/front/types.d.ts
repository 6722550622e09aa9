// The types of the modules of an explanation's page. `page_data` in `page.py` writes the data.

import type { Computed, Tree } from "../../base/front/types.d.ts";

export type StepKind = "number" | "integer" | "allowed";
export type ArrayType = "float32" | "float64" | "int32" | "uint8";

/** A step as Python writes it. */
export interface StepData {
  name: string; formula: string; code: string; why: string; shape: string; given: boolean; aside: boolean; kind: StepKind;
  axes: string[]; sizes: number[]; more: number[]; of: number[] | null; copies: [number, number]; tree: Tree | null;
  within: [number, number] | null; type: ArrayType; values: string;
}

/** A step with its numbers: `first`, as they came; `made`, the node that computes it, where the page has one. */
export interface Step extends StepData {
  numbers: Float64Array; first: Float64Array; node: Computed; made: Computed | null;
  problem: string; changed: boolean;
}

export interface PartData { title: string; drawn: string | null; steps: StepData[] }
export interface Part { title: string; drawn: string | null; steps: Step[] }
export interface Data {
  title: string; digits: number; leftOut: string[]; whole: boolean; keys: [number, number]; single: [boolean, boolean];
  labels: Record<string, string[]>; places: Record<string, number[]>; pair: number[]; parts: PartData[];
}

/** The choice: a step, the step whose number is written out, and the place of that number. */
export interface Choice { step: string; of: string; at: Record<string, number> }

/** A table of a step. */
export interface TableView {
  step: Step; figure: HTMLElement; cells: HTMLTableCellElement[][]; rows: number | null; columns: number | null;
  operand: boolean;
  indexAt(cell: HTMLElement): number[]; cellAt(index: number[]): HTMLTableCellElement | null;
  positionOf(cell: HTMLElement): [number, number]; turnTo(index: number[]): void; paint(): void;
}

/** A card of one step, or of inputs that stand together; its tables are made when it is first shown. */
export interface Card { part: Part; steps: Step[]; element: HTMLElement; link: HTMLAnchorElement; views: TableView[] | null }

/** A shape of a picture that moves: each attribute once, or with its value in each frame. */
export interface Moving { tag: keyof SVGElementTagNameMap; attributes: Record<string, string | string[]>; text: string | string[] }
/** As `Motion` in `motion.py` writes it; `pause` in seconds. */
export interface MotionData { words: string[]; height: number; pause: number; shapes: Moving[] }
