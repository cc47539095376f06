// The window on the replicas' time: where it is, what the server sent for it, and the clock that runs on while a job does.
import { useEffect, useRef, useState } from "app/html.js";

const WAIT_MS = 90; // after the last movement, before the server is asked
const LIVE_MS = 1000; // how often while a job runs
const FRAME_MS = 200; // between pictures while it is followed
const MARGIN = 0.5; // of the window, asked for on both sides: moving shows it at once
const SHORTEST_S = 0.05;

export function useWindow(store, { pixels, usual }) {
  const [timeline, setTimeline] = useState(null);
  const [whole, setWhole] = useState(null);
  const [view, setView] = useState(null); // {from, to, follow}
  const [problem, setProblem] = useState(null);
  const [, setBeat] = useState(0);
  const got = useRef({ endS: 0, atMs: 0, alive: false });
  const moved = useRef(false);
  const bins = Math.max(100, Math.min(2000, Math.round((pixels * (1 + 2 * MARGIN)) / 1.5)));

  // While nobody tells, time stands still.
  const runs = () => got.current.alive && store.connection.peek() !== "away";
  const nowS = () => got.current.endS + (runs() ? (performance.now() - got.current.atMs) / 1000 : 0);
  const keep = (found) => {
    got.current = { endS: found.end_s, atMs: performance.now(), alive: found.alive };
  };

  // The whole job, in counts: for the strip below, and to know where it ends.
  const tick = store.tick.value;
  const coarse = store.steps.value;
  const ended = !store.job.value.replicas || store.job.value.state !== "running";
  useEffect(() => {
    if (pixels <= 0) return;
    store.source.replicas({ bins: Math.max(100, Math.min(1000, Math.round(pixels / 2))), most: 0 }).then((found) => {
      keep(found);
      setWhole(found);
      setProblem(null);
      if (!moved.current || !view) {
        const span = usual && usual < found.end_s ? usual : Math.max(1, found.end_s);
        setView({ from: Math.max(0, found.end_s - span), to: Math.max(span, found.end_s), follow: true });
        moved.current ||= Boolean(usual);
      }
    }, (failure) => failure.status && setProblem(failure)); // 0: the server is away, which stands above
  }, [coarse, ended, pixels > 0, usual === null]);

  // The window itself.
  const at = view && `${view.from.toFixed(3)} ${view.to.toFixed(3)} ${view.follow}`;
  useEffect(() => {
    if (!view || pixels <= 0) return undefined;
    let current = true;
    const timer = setTimeout(async () => {
      const end = view.follow ? Math.max(view.to, nowS()) : view.to;
      const span = view.to - view.from;
      try {
        const found = await store.source.replicas({ from_s: Math.max(0, end - span * (1 + MARGIN)), to_s: end + (view.follow ? 0.05 : MARGIN) * span, bins });
        if (!current) return;
        keep(found);
        setTimeline(found);
        setProblem(null);
      } catch (failure) {
        if (current && failure.status) setProblem(failure);
      }
    }, timeline ? WAIT_MS : 0);
    return () => {
      current = false;
      clearTimeout(timer);
    };
  }, [view?.follow ? "follow" : at, view && (view.to - view.from).toFixed(3), tick, bins > 0]);

  // While a job runs: the clock, and what its replicas do.
  const alive = Boolean(timeline?.alive) && !store.source.fixed;
  useEffect(() => {
    if (!alive) return undefined;
    const beat = setInterval(() => !document.hidden && setBeat((n) => n + 1), FRAME_MS);
    const ask = setInterval(() => !document.hidden && (store.tick.value += 1), LIVE_MS);
    return () => {
      clearInterval(beat);
      clearInterval(ask);
    };
  }, [alive]);

  const clamp = (from, to) => {
    const end = Math.max(1e-3, nowS());
    const span = Math.min(Math.max(SHORTEST_S, to - from), Math.max(1, end * 1.02));
    const start = Math.max(0, Math.min(from, end * 1.02 - span));
    return { from: start, to: start + span, follow: start + span >= end - 1e-6 };
  };
  const seen = view && (view.follow ? { ...view, from: Math.max(0, nowS() - (view.to - view.from)), to: Math.max(view.to - view.from, nowS()) } : view);
  const change = (to) => {
    moved.current = true;
    setView(to);
  };
  return {
    timeline, whole, view: seen, problem, nowS,
    zoom(factor, where = 0.5) {
      if (!seen) return;
      const pivot = seen.follow && where === 0.5 ? seen.to : seen.from + where * (seen.to - seen.from);
      change(clamp(pivot - (pivot - seen.from) * factor, pivot + (seen.to - pivot) * factor));
    },
    pan(share) {
      if (!seen) return;
      const by = share * (seen.to - seen.from);
      change(clamp(seen.from + by, seen.to + by));
    },
    show(from, span) {
      change(span === Infinity ? { from: 0, to: Math.max(1e-3, nowS()), follow: true } : clamp(from, from + span));
    },
    follow(span = null) {
      if (!seen) return;
      const length = Math.min(span ?? seen.to - seen.from, Math.max(1e-3, nowS()));
      change({ from: Math.max(0, nowS() - length), to: Math.max(length, nowS()), follow: true });
    },
  };
}
