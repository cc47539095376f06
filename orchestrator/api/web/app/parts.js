// Small parts that many pages use.
import { html, useRef, useEffect, useState, useId } from "app/html.js";

const STATE_WORDS = {
  queued: "queued", running: "running", interrupted: "interrupted", succeeded: "succeeded", failed: "failed",
  cancelled: "cancelled",
};

export const State = ({ state }) => html`<span class=${`state ${state}`}><i aria-hidden="true"></i>${STATE_WORDS[state]}</span>`;

export function Panel({ title, note, actions, children, className = "" }) {
  const id = useId();
  return html`<section class=${`panel ${className}`} aria-labelledby=${id}>
    <header>
      <h2 id=${id}>${title}</h2>
      ${note && html`<p class="note">${note}</p>`}
      ${actions && html`<div class="actions">${actions}</div>`}
    </header>
    ${children}
  </section>`;
}

// A modal dialog that is open as long as it is drawn. `onClose` is also Escape.
export function Dialog({ title, onClose, children, className = "" }) {
  const ref = useRef();
  const id = useId();
  useEffect(() => {
    const before = document.activeElement;
    ref.current.showModal();
    return () => before?.focus?.();
  }, []);
  return html`<dialog ref=${ref} class=${className} aria-labelledby=${id} onCancel=${(event) => { event.preventDefault(); onClose(); }}
    onClick=${(event) => event.target === ref.current && onClose()}>
    <div class="dialog"><h2 id=${id}>${title}</h2>${children}</div>
  </dialog>`;
}

// A table of numbers with its caption; `columns`: [{title, key | value(row), left, code}].
export function Table({ caption, columns, rows, hidden = false }) {
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${caption}>
    <table class=${columns.length > 3 ? "cards" : ""}>
      <caption class=${hidden ? "away" : ""}>${caption}</caption>
      <thead><tr>${columns.map((c) => html`<th scope="col" class=${c.left ? "left" : ""}>${c.title}</th>`)}</tr></thead>
      <tbody>${rows.map(
        (row) => html`<tr class=${row.className ?? ""}>${columns.map((c, i) => {
          const shown = c.value ? c.value(row) : row[c.key];
          return i === 0
            ? html`<th scope="row" class=${c.left ? "left" : ""}>${shown}</th>`
            : html`<td class=${c.left ? "left" : ""} data-label=${typeof c.title === "string" ? c.title : ""}>${shown}</td>`;
        })}</tr>`,
      )}</tbody>
    </table>
  </div>`;
}

// A line of values without axes. For the eye only: the value stands beside it.
export function Spark({ values, width = 92, height = 22 }) {
  if (!values || values.length < 2) return null;
  const low = Math.min(...values);
  const span = Math.max(...values) - low || 1;
  const points = values
    .map((v, i) => `${((i * width) / (values.length - 1)).toFixed(1)},${(height - 2 - ((v - low) * (height - 4)) / span).toFixed(1)}`)
    .join(" ");
  return html`<svg class="spark" width=${width} height=${height} viewBox=${`0 0 ${width} ${height}`} aria-hidden="true">
    <polyline points=${points} fill="none" /></svg>`;
}

export function Failure({ problem }) {
  return html`<div class="failure" role="alert"><p>${problem.message}</p></div>`;
}

// A promise's value, asked for again when `deps` change: {value, problem, busy}. The value before stays until it comes.
export function useAsk(ask, deps) {
  const [state, setState] = useState({ value: null, problem: null, busy: true });
  useEffect(() => {
    let current = true;
    setState((s) => ({ ...s, busy: true }));
    ask().then(
      (value) => current && setState({ value, problem: null, busy: false }),
      (problem) => current && setState((s) => ({ ...s, problem, busy: false })),
    );
    return () => (current = false);
  }, deps);
  return state;
}

// The width of an element, as it changes.
export function useWidth(ref) {
  const [width, setWidth] = useState(0);
  useEffect(() => {
    const observer = new ResizeObserver(([entry]) => setWidth(Math.floor(entry.contentRect.width)));
    observer.observe(ref.current);
    return () => observer.disconnect();
  }, []);
  return width;
}

// A command, and a button that puts it into the clipboard.
export function Copied({ text }) {
  const [done, setDone] = useState(false);
  const copy = async () => {
    await navigator.clipboard.writeText(text);
    setDone(true);
    setTimeout(() => setDone(false), 2000);
  };
  return html`<span class="copied"><code>${text}</code>${navigator.clipboard && html`<button type="button" class="quiet" onClick=${copy}>${done ? "Copied" : "Copy"}</button>`}</span>`;
}
