// The whole job as a strip, with the window that is shown above marked in it; click or drag moves the window.
import { html, useEffect, useRef } from "app/html.js";
import { STATES } from "app/gantt_draw.js";

const HEIGHT = 34;

export function Overview({ timeline, view, palette, width, gutter, nowS, show }) {
  const canvas = useRef();
  const inner = width - gutter;
  const end = Math.max(timeline.to_s, nowS, 1e-3);
  useEffect(() => {
    const element = canvas.current;
    if (!element || width <= 0) return;
    const ratio = window.devicePixelRatio || 1;
    [element.width, element.height] = [Math.round(width * ratio), HEIGHT * ratio];
    const ctx = element.getContext("2d");
    ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
    ctx.fillStyle = palette.lane;
    ctx.fillRect(gutter, 2, inner, HEIGHT - 4);
    const bins = timeline.functions[0]?.counts?.busy.length ?? 0;
    const sums = (k, state) => timeline.functions.reduce((sum, f) => sum + f.counts[state][k], 0);
    const most = Math.max(1, ...timeline.functions.map((f) => f.most), ...Array.from({ length: bins }, (_, k) => STATES.reduce((sum, s) => sum + sums(k, s), 0)));
    const step = (timeline.to_s - timeline.from_s) / Math.max(1, bins);
    for (let k = 0; k < bins; k++) {
      let base = 0;
      const left = gutter + ((timeline.from_s + k * step) / end) * inner;
      for (const state of STATES) {
        const height = (sums(k, state) / most) * (HEIGHT - 6);
        ctx.fillStyle = palette[state];
        ctx.fillRect(left, HEIGHT - 2 - base - height, (step / end) * inner + 0.4, height);
        base += height;
      }
    }
    const [left, right] = [gutter + (view.from / end) * inner, gutter + (Math.min(view.to, end) / end) * inner];
    ctx.fillStyle = palette.veil;
    ctx.fillRect(gutter, 2, left - gutter, HEIGHT - 4);
    ctx.fillRect(right, 2, width - right, HEIGHT - 4);
    ctx.strokeStyle = palette.accent;
    ctx.lineWidth = 1.5;
    ctx.strokeRect(left + 0.75, 1.75, Math.max(3, right - left - 1.5), HEIGHT - 3.5);
    ctx.fillStyle = palette.muted;
    ctx.font = "11px system-ui, sans-serif";
    ctx.textAlign = "right";
    ctx.textBaseline = "middle";
    ctx.fillText("whole job", gutter - 8, HEIGHT / 2);
  });
  const move = (event) => {
    if (!(event.buttons & 1)) return;
    const span = view.to - view.from;
    show(((event.offsetX - gutter) / inner) * end - span / 2, span);
  };
  return html`<canvas ref=${canvas} class="overview" aria-hidden="true" style=${`width:100%;height:${HEIGHT}px`}
    onPointerDown=${(event) => { event.currentTarget.setPointerCapture(event.pointerId); move(event); }} onPointerMove=${move}></canvas>`;
}
