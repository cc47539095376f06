// What curves are made of before they are drawn: smoothed, added up, laid over each other.

export const SMOOTHING = [[0, "none"], [0.6, "some"], [0.9, "much"]];
const RATE = /\/acc\/|clip_ratio|clipfrac|_fraction$/;

// Where an axis begins and ends: rates are always seen from 0 to 1.
export const reach = (name) => (RATE.test(name) ? "rate" : "data");

// An exponential mean whose first values count as much as they should (Adam's bias correction). Gaps stay gaps.
export function smooth(values, by) {
  if (!by) return values;
  let mean = 0;
  let weight = 0;
  return values.map((v) => {
    if (v === null || v === undefined) return v;
    mean = by * mean + (1 - by) * v;
    weight = by * weight + (1 - by);
    return mean / weight;
  });
}

export function sums(values) {
  let total = 0;
  return values.map((v) => (total += v ?? 0));
}

// Curves with an x of their own over all x that any has: {x, columns}; null where one has no value.
export function together(curves) {
  const x = [...new Set(curves.flatMap((c) => c.x))].sort((a, b) => a - b);
  const columns = curves.map((c) => {
    const at = new Map(c.x.map((v, i) => [v, c.values[i]]));
    return x.map((v) => at.get(v) ?? null);
  });
  return { x, columns };
}
