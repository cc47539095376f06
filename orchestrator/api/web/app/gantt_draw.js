// Draws replicas over time on a canvas: a bar per replica in its lane, or, from far away, counts stacked by state.
// Pure but for the canvas: everything it needs comes in. Lengths are CSS pixels, times seconds.
import { duration, times } from "app/format.js";

export const STATES = ["busy", "idle", "starting", "draining"];
export const HEAD = 18; // room for the steps' numbers
export const FOOT = 22; // room for the time axis
const GAP = 12;

// Where each function's rows are: {rows: [{name, top, height, lanes, lane}], height}.
export function layout(timeline) {
  const lanes = timeline.functions.map((f) => Math.max(1, f.most, ...(f.lives ?? []).map((life) => life[0] + 1)));
  const total = lanes.reduce((a, b) => a + b, 0);
  const lane = Math.max(3, Math.min(16, Math.floor(260 / total)));
  let top = HEAD;
  const rows = timeline.functions.map((f, i) => {
    const height = Math.max(14, lanes[i] * lane);
    const row = { name: f.name, top, height, lanes: lanes[i], lane: height / lanes[i] };
    top += height + GAP;
    return row;
  });
  return { rows, height: top - GAP + 6 + FOOT };
}

export function draw(ctx, { width, gutter, timeline, places, view, colors, nowS }) {
  const inner = width - gutter;
  const x = (s) => gutter + ((s - view.from) / (view.to - view.from)) * inner;
  ctx.clearRect(0, 0, width, places.height);
  ctx.font = "11px system-ui, sans-serif";
  axis(ctx, { x, view, colors, places, width, gutter });
  marks(ctx, { x, timeline, colors, places, gutter, width });
  ctx.save();
  ctx.beginPath();
  ctx.rect(gutter, 0, inner, places.height);
  ctx.clip();
  timeline.functions.forEach((f, i) => {
    const row = places.rows[i];
    ctx.fillStyle = colors.lane;
    ctx.fillRect(gutter, row.top, inner, row.height);
    if (timeline.lanes) bars(ctx, { f, row, x, view, colors, endS: timeline.end_s, nowS });
    else area(ctx, { f, row, x, timeline, colors });
  });
  ctx.restore();
  ctx.textBaseline = "middle";
  ctx.textAlign = "right";
  ctx.fillStyle = colors.ink;
  for (const row of places.rows) ctx.fillText(row.name, gutter - 8, row.top + row.height / 2, gutter - 10);
  if (timeline.alive && nowS >= view.from && nowS <= view.to) {
    ctx.strokeStyle = colors.now;
    line(ctx, x(nowS), HEAD - 4, x(nowS), places.height - FOOT);
  }
}

function bars(ctx, { f, row, x, view, colors, endS, nowS }) {
  const open = (stop) => (stop >= endS - 1e-3 && nowS > endS ? nowS : stop); // it goes on while we look
  const bar = (lane, from, to, color) => {
    if (to < view.from || from > view.to || to < from) return;
    const left = x(Math.max(from, view.from));
    ctx.fillStyle = color;
    ctx.fillRect(left, row.top + lane * row.lane + 0.5, Math.max(0.75, x(Math.min(to, view.to)) - left), Math.max(1.5, row.lane - 1));
  };
  for (const [lane, start, ready, draining, stop] of f.lives) {
    const end = open(stop);
    bar(lane, start, end, colors.idle);
    if (ready > start) bar(lane, start, ready >= stop ? end : ready, colors.starting);
    if (draining < stop) bar(lane, Math.max(draining, start), end, colors.draining);
  }
  for (const [lane, start, stop] of f.calls) if (stop > start) bar(lane, start, open(stop), colors.busy);
}

function area(ctx, { f, row, x, timeline, colors }) {
  const bins = f.counts.busy.length;
  const step = (timeline.to_s - timeline.from_s) / bins;
  const base = new Float64Array(bins);
  for (const state of STATES) {
    ctx.fillStyle = colors[state];
    ctx.beginPath();
    for (let k = 0; k < bins; k++) {
      const count = f.counts[state][k];
      if (count <= 0) continue;
      const left = x(timeline.from_s + k * step);
      const scale = row.height / row.lanes;
      const bottom = row.top + row.height - base[k] * scale;
      const height = Math.min(count * scale, bottom - row.top);
      ctx.rect(left, bottom - height, Math.max(0.8, x(timeline.from_s + (k + 1) * step) - left + 0.3), height);
      base[k] += count;
    }
    ctx.fill();
  }
}

function marks(ctx, { x, timeline, colors, places, gutter, width }) {
  ctx.strokeStyle = colors.grid;
  ctx.fillStyle = colors.muted;
  ctx.textAlign = "left";
  ctx.textBaseline = "alphabetic";
  let free = gutter;
  for (const [number, start, stop] of timeline.steps) {
    const left = x(start);
    const right = x(stop);
    if (right >= gutter && right <= width) line(ctx, right, HEAD - 4, right, places.height - FOOT);
    const text = `step ${number}`;
    const room = ctx.measureText(text).width;
    const at = Math.max(left, gutter) + 3;
    if (right > gutter && at >= free && at + room < Math.min(right, width) + 4) {
      ctx.fillText(text, at, HEAD - 6);
      free = at + room + 8;
    }
  }
}

function axis(ctx, { x, view, colors, places, width, gutter }) {
  const values = times(view.from, view.to, Math.max(2, Math.floor((width - gutter) / 80)));
  const bottom = places.height - FOOT;
  ctx.strokeStyle = colors.grid;
  ctx.fillStyle = colors.muted;
  ctx.textAlign = "center";
  ctx.textBaseline = "top";
  line(ctx, gutter, bottom + 0.5, width, bottom + 0.5);
  for (const value of values) {
    const at = x(value);
    line(ctx, at, bottom, at, bottom + 4);
    if (at > gutter + 12 && at < width - 18) ctx.fillText(duration(value), at, bottom + 7);
  }
}

function line(ctx, x0, y0, x1, y1) {
  ctx.lineWidth = 1;
  ctx.beginPath();
  ctx.moveTo(Math.round(x0) + 0.5, y0);
  ctx.lineTo(Math.round(x1) + 0.5, y1);
  ctx.stroke();
}

// What is at a point: lines of text, or null.
export function at(px, py, { width, gutter, timeline, places, view }) {
  const i = places.rows.findIndex((row) => py >= row.top && py <= row.top + row.height);
  if (i < 0 || px < gutter) return null;
  const f = timeline.functions[i];
  const row = places.rows[i];
  const s = view.from + ((px - gutter) / (width - gutter)) * (view.to - view.from);
  if (!timeline.lanes) {
    const bins = f.counts.busy.length;
    const k = Math.floor(((s - timeline.from_s) / (timeline.to_s - timeline.from_s)) * bins);
    if (k < 0 || k >= bins) return null;
    return [f.name, ...STATES.filter((state) => f.counts[state][k] > 0).map((state) => `${f.counts[state][k]} ${state}`)];
  }
  const lane = Math.floor((py - row.top) / row.lane);
  const life = f.lives.find(([on, start, , , stop]) => on === lane && s >= start && s <= stop);
  if (!life) return null;
  const [, start, ready, draining, stop, replica] = life;
  const call = f.calls.find(([on, from, to]) => on === lane && s >= from && s <= to);
  const state = s < ready ? "starting" : s >= draining && draining < stop ? "draining" : call ? "busy" : "idle";
  const found = [replica, `${state}${call?.[3] ? `: ${call[3]}, ${duration(call[2] - call[1])}` : ""}`, `there for ${duration(stop - start)}`];
  return ready > start ? [...found, `started in ${duration(ready - start)}`] : found;
}

// Seconds that each function's replicas spent in each state within the view: for the table.
export function sums(timeline, view) {
  const overlap = (a, b) => Math.max(0, Math.min(b, view.to) - Math.max(a, view.from));
  return timeline.functions.map((f) => {
    if (!timeline.lanes) {
      const step = (timeline.to_s - timeline.from_s) / f.counts.busy.length;
      const total = (state) => f.counts[state].reduce((sum, n, k) => sum + n * overlap(timeline.from_s + k * step, timeline.from_s + (k + 1) * step), 0);
      return { name: f.name, ...Object.fromEntries(STATES.map((state) => [state, total(state)])) };
    }
    const add = (list, from, to) => list.reduce((sum, row) => sum + overlap(row[from], row[to]), 0);
    const all = add(f.lives, 1, 4);
    const found = { name: f.name, busy: add(f.calls, 1, 2), starting: add(f.lives, 1, 2), draining: add(f.lives, 3, 4) };
    return { ...found, idle: Math.max(0, all - found.busy - found.starting - found.draining) };
  });
}
