// What every part is written with: markup in template strings (htm), Preact, signals.
import { h, render, Fragment } from "preact";
import htm from "htm";

export const html = htm.bind(h);
export { render, Fragment };
export { useEffect, useLayoutEffect, useRef, useState, useMemo, useId } from "preact/hooks";
export { signal, computed, effect, batch, useSignal, useComputed, useSignalEffect } from "@preact/signals";
