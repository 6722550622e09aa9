// The types that the modules of the report share. The format of the file is described in `clearhead/report/page.py`.

import type { Computed, Tree } from "../../base/front/types.d.ts";
import type { Theme } from "../../base/front/theme.js";
import type { Scale } from "./colour.js";
import type { Run } from "./data.js";
import type { Layout } from "./layout.js";
import type { Prose } from "./prose.js";
import type { Strip } from "./strip.js";
import type { View } from "./view.js";

export type Numbers = Uint8Array | Uint16Array | Int32Array | Float32Array | Float64Array;
export type Direction = "out" | "in";
export type Phi = keyof typeof import("./weights.js").PHIS;

/** The place of an array, in one part or in several. */
export type Places = number | number[];

/** A measure of a head: its value, uniform attention's value, the key of the measure or null, the number of queries. */
export type MeasureFigure = [number, number, (number | null)?, (number | null)?];

export interface Measure { name: string; says: string; formula: string; range: string; does: string | null; alone?: boolean }
export interface StepText { name: string; formula: string; tree: Tree | null }
export interface Aligned { texts: [number, number]; positions: [number[], number[]] }
export interface HeadAt { layer: number; head: number }
export interface Distinctive extends HeadAt { sentence: string; measure: string; nearUniform: boolean }

/** The data of a head in the file, or of all heads of a layer. */
export interface Parts {
  number: number;
  sink?: number | null;
  start: Places; stop: Places; counts: Places; expected?: Places | null;
  logsumexp?: Places | null; entropy?: Places | null; received?: Places | null; distance?: Places | null;
  query?: Places | null; key?: Places | null; weight?: Places | null; scores?: Places | null;
  relative?: Places | null; valueNorms?: Places | null; transformedNorms?: Places | null;
  slopes?: { grad: Places; value: Places; raises: number; lowers: number; features: number };
  dense?: { rows: number; columns: number; values: number } | null;
  tiles?: TilesAt | null; holes?: TilesAt | null;
  pyramid?: Grid & { max: Places; mean: Places } | null;
}
export interface TilesAt { side: number; places: number; values: Places }
export interface Grid { rows: number; columns: number; perRow: number; perColumn: number }

export interface HeadOfLayer extends Parts { measures: Record<string, MeasureFigure> }
export interface Layer {
  name: string; label: string; kind: string; role?: string | null;
  queryText: number; keyText: number; queries: number; keys: number;
  position: number | null; answer: number | null; begins: number[]; phi: Phi | null; features: number;
  pairs: [number, number, number | null][];
  scale: number; softcap: number | null; error: number | null; why: number; whyBlind: number;
  thumbnail: { block: number; rows: number; columns: number };
  shared: Partial<Parts>; heads: HeadOfLayer[];
}

export interface Meta {
  title: string; texts: string[][]; originals: Record<string, Record<string, string>>; steps: StepText[][];
  measures: Measure[]; distinctive: Distinctive | null; opens: HeadAt | null; leftOut: { name: string; reason: string }[];
  beside: [number, number][]; aligned: Aligned[]; flows: number[][]; image: Picture | null;
  layers: (Omit<Layer, "heads"> & { heads: (Parts & { measures?: (MeasureFigure | 0)[] })[] })[];
}

/** A picture whose patches are tokens: the place of its bytes, its pixels, its patches, and the tokens before these. */
export interface Picture { place: number; width: number; height: number; rows: number; columns: number; extra: number }

/** Where the data come from. */
export interface DataSource { meta: Meta; block(number: number): Promise<ArrayBuffer> }

export interface Tiles { side: number; across: number; places: Numbers; values: Numbers }
export interface Pyramid extends Grid { max: Numbers; mean: Numbers }

/** A head before its operands are read: for a long head all of this is in the file, for others some is computed. */
export interface Afar {
  layer: Layer; number: number; queries: number; keys: number; features: number; phi: Phi | null; scale: number;
  softcap: number | null; position: number | null; kind: string; parts: Parts; sink: number | null;
  start: Numbers; stop: Numbers; counts: Numbers; expected: Numbers | null;
  logsumexp: Numbers | null; entropy: Numbers | null; received: Numbers | null; distance: Numbers | null;
  pyramid: Pyramid | null;
  mostKeys?: number; alike?: boolean; ratios?: Float64Array; evenness?: Float64Array; // computed once
}

/** A head as `weights.js` reads it. */
export interface Head extends Afar, Operands, Remade {
  logsumexp: Numbers; received: Numbers;
  plain?: Head; // of a head with another meaning, the head with its weights
  valueNorms: Numbers | null; transformedNorms: Numbers | null;
  rows?: Int32Array | null; columns?: Int32Array | null; // the places of another text's tokens in its own: `difference.js`
  strongest?: Map<number, [number, number][]>; why?: { row: number; steps: Map<string, WhyStep> }; // computed once
}

/** The numbers from which the scores of a head are computed. */
export interface Operands {
  query: Numbers; key: Numbers; weight: Numbers | null; scores: Numbers | null; relative: Numbers | null;
  dense: { rows: number; columns: number; values: Numbers } | null; tiles: Tiles | null; holes: Tiles | null;
}

/** A number that the page shows of each pair: its words, and what is missing for it, "" where nothing is. */
export interface Meaning {
  name: string; title: string; unit: string; says: string; lacks(run: Run, at: HeadAt): string;
}

/** What makes another number of each weight: a factor of each key, or of each pair; or the numbers themselves. */
export interface Remade {
  times?: Numbers | null; slope?: { grad: Numbers; value: Numbers; features: number; factor: number } | null;
  shares?: Numbers | null;
}

/** The numbers from which the weights of a head are computed: a head, or the part that the worker gets. */
export type Weighed = Operands & Remade & Pick<Head, "queries" | "keys" | "features" | "phi" | "scale" | "softcap" | "start" | "stop"
  | "counts" | "logsumexp" | "sink" | "mostKeys" | "alike">;

/** The same without the sums over the keys. */
export type Scored = Omit<Weighed, "logsumexp" | "sink">;

/** A step of a weight: one that is given, or one that is computed, with the numbers of a row. */
export interface WhyStep { name: string; formula: string; node: Computed; found: Found | null }
export interface Found { made: Computed; sizes: number[]; numbers: Float64Array }

/** All weights of one token. */
export interface Look {
  head: Head; view: Direction; token: number; weights: Float64Array; allowed: number[]; sum: number;
  readonly ranked: number[];
}

/** A token as the page shows it: see `readText`. */
export interface Word {
  raw: string; label: string; gap: boolean; joined: boolean; special: boolean; prose: string; plain: boolean;
  ends: boolean; repeated: boolean; other?: string;
  at?: number; only?: 0 | 1; // in two texts as one: its place in its own text, and which text alone has it
}

/** The words of the queries, and of the keys. */
export type Names = [Word[], Word[]];

/** A pair; one side is null for a whole token. */
export interface Pair { i: number | null; j: number | null }
export interface FullPair { i: number; j: number }

/** The shown head, token and pair. */
export interface Shown extends Pair {
  head: Head; layer: Layer; look: Look; pair: number | null; names: Names; view: Direction; scale: Scale; meaning: Meaning;
}

/** The same before the head's operands are read. */
export interface Sketch extends Pair {
  head: Afar; layer: Layer; look: null; pair: null; names: Names; view: Direction; scale: Scale; meaning: Meaning;
}

/** The entries that panes add to the address. */
export type More = "by" | "against" | "show" | "only" | "pins" | "tokens" | "arcs" | "spelling" | "zoom" | "pool" | "a" | "b"
  | "lines" | "meaning" | "colours" | "all";
export type Reader = (text: string | null, run: Heads, parts: URLSearchParams) => string | null;
export type Readers = Partial<Record<More, Reader>>;
export type Change = Partial<Record<More, string | null> & {
  layer: number; head: number; view: Direction; token: number | null; pair: number | null; scale: string;
}>;

/** The parts of a recording that the panes of heads read, which a survey has too. */
export interface Heads {
  title: string; measures: Measure[]; layers: LayerOfHeads[]; first: HeadAt; distinctive: Distinctive | null;
  leftOut: { name: string; reason: string }[]; beside: [number, number][];
  texts?: string[][]; aligned?: Aligned[]; array?(place: number): Promise<Numbers>;
}

/** The same of a layer. */
export interface LayerOfHeads extends Pick<Layer, "name" | "label" | "kind" | "role" | "queryText" | "keyText" | "queries"
  | "keys"> {
  heads: Pick<HeadOfLayer, "number" | "measures">[]; thumbnail?: Layer["thumbnail"];
}

/** The page that a pane of heads stands in. */
export interface PageOfHeads {
  host: HTMLElement; root: ShadowRoot; run: Heads; view: View; labels: string[]; theme: Theme; texts?: Word[][];
  find<Kind extends Element = HTMLElement>(id: string, kind?: new () => Kind): Kind;
  choose(change: Change, step?: boolean): void;
}

/** A pane. A method is left out where it would do nothing. */
export interface Pane {
  paint?(shown: Shown): void; sketch?(shown: Sketch): void; hover?(pair: Pair | null): void; linger?(shown: Shown): void;
  close?(): void;
}

/** A head in the pane of heads: its name, its square, and its row in the list. */
export interface HeadPlace extends HeadAt { name: string; element: HTMLElement; row?: HTMLElement }

/** A head's value of a measure: see `figureOf`. */
export interface Figure { value: number; uniform: number; key: number | null; queries: number | null; departs: number }

/** A rectangle of cells that is asked for: see `tileOf`. */
export interface TileRequest extends Grid { i: number; j: number; mean: boolean; relative: boolean }

/** The meaning of the cells of the map. */
export interface CellKind { mean: boolean; relative: boolean }

/** A tile of the map: its place, and its distance from the middle of the part in sight. */
export interface TileInSight extends TileRequest { head: Afar | Head; name: string; far: number }

/** A tile that has been computed, and the picture of it in some colours. */
export interface Tile extends TileRequest { values: Float32Array; canvas: HTMLCanvasElement | null; colours: string }

/** Computations beside the page. */
export interface Asked { job: "tile"; request: TileRequest }
export type Answer = Float32Array | null;

/** The messages to the worker, and its answers. */
export type ToWorker = { job: "keep"; number: number; head: Weighed } | { job: "forget"; number: number }
  | { job: "stop"; id: number } | { job: "answer"; id: number; number: number; asked: Asked };
export interface FromWorker { id: number; found: Answer }

/** The actions of the map's gestures. Points are CSS pixels from the corner of the element. */
export interface Moves {
  zoom(step: number, point: Point): void; zoomTo(factor: number, point: Point): void; scale(): number;
  scaleTo(pixels: number, point: Point): void; free(way: number): boolean; drag(x: number, y: number): void;
  point(point: Point | null): void; choose(point: Point): void;
}

/** A scale of the map: tokens in a cell, and its pixels. */
export interface MapScale { per: number; cell: number }

/** The placement of a word beside the map. */
export interface LabelStyle { ink: string; ground?: string; bold?: boolean; turned?: boolean }

/** A part of a long text that is added and removed as a whole. */
export interface Chunk { from: number; to: number; box: HTMLElement; filled: boolean; height?: number }

/** The place where an arc meets a token. */
export interface Meeting { x: number; top: number; bottom: number; off: string }

/** Heads that are pinned; a survey has none. */
export interface PinsOfHeads { toggle(place: HeadAt): void; paint(): void }

export interface HeadOfSurvey {
  number: number; measures: (SurveyFigure | 0)[]; examples: Record<number, ExampleOfHead[]>;
}

/** The data of a survey's page: see `heads_page.py`. */
export type SurveyFigure = [number, number | null, number | null];

/** An example of a head: value, uniform attention's value, query, key, and tokens as [position, word, word, …]. */
export type ExampleOfHead = [number, number | null, number | null, number, [number, ...number[]][]];
export interface SurveyMeta {
  title: string; said: string; measures: (Measure & { share: boolean })[];
  layers: { name: string; label: string; heads: HeadOfSurvey[] }[]; words: string[];
}

/** The model of `anywidget`: the state that is shared with Python, and messages. */
export interface WidgetModel {
  get(name: "height"): number; get(name: "meta" | "address"): string;
  set(name: "address", value: string): void; save_changes(): void; send(message: { block: number }): void;
  on(event: "msg:custom", found: WidgetFound): void; on(event: "change:address", found: () => void): void;
  off(event: "msg:custom", found: WidgetFound): void; off(event: "change:address", found: () => void): void;
}
export interface Said { block: number; error?: string }
export type WidgetFound = (said: Said, buffers: DataView<ArrayBuffer>[]) => void;

/** A text in the pane of text. */
export interface Listing {
  side: "both" | "query" | "key"; text: number; title: string; prose: Prose; strip: Strip; over: number | null;
}

/** A weight with its query and its key. */
export type WeightedPair = [number, number, number];
export interface Shading {
  view: Direction; tokens: number[]; weights: Float64Array; fair: Float64Array; strongest: WeightedPair[];
}

/** A side of a comparison: the heads whose mean it is; uniform attention has no heads. */
export interface Side { name: string; heads: Head[]; places: HeadAt[] }
/**
 * Two texts as one: its queries and keys, and for the layers of the first and of the second text the places of these in the
 * layer's own texts, −1 for a token that the text lacks; null where all places are equal.
 */
export interface Frame {
  queries: number; keys: number; layers: [Layer, Layer]; rows: (Int32Array | null)[]; columns: (Int32Array | null)[];
}
export interface ApartPair extends FullPair { a: number; b: number }
export interface Difference {
  pool: Float32Array; limit: number; byQuery: Float64Array; byKey: Float64Array; mean: number; compared: number;
  leftOut: number; alone: [number, number]; step: number; largest: ApartPair[];
}
/** The largest weight of each cell of a side, and the largest multiple of uniform attention; NaN where it has none. */
export interface SideMap { plain: Float32Array; relative: Float32Array }

/** A comparison, and the way it is shown. */
export interface Compared {
  sides: [Side, Side]; head: Head; frame: Frame; names: Names; layout: Layout; difference: Difference; maps: SideMap[];
}

/** A point in CSS pixels. */
export type Point = [number, number];

declare global {
  /** The program of the worker: `packaging/bundle.mjs` puts it here. */
  const WORKER_PROGRAM: string;
  /** The content of a report's element, which Python puts before the program. */
  const MARKUP: string;
  interface Uint8ArrayConstructor { fromBase64?(text: string): Uint8Array<ArrayBuffer> }
  interface Window { clearhead: object; clearheadProblem(text: string): void }
}
