// One job as the page knows it: signals that its parts draw, brought up to date as events come.
import { signal, batch } from "app/html.js";
import { follow } from "app/feed.js";

const POINTS = 400; // of a curve: about as many as a chart has pixels
const SOON_MS = 300; // events that come together ask once
const LOOK_MS = 4000; // at a job that has ended: somebody may resume it

export function openStore(id, source) {
  const store = {
    id,
    source,
    job: signal(null),
    failure: signal(null), // a Problem: the job cannot be shown
    connection: signal(source.fixed ? "over" : "connecting"), // connecting | live | away | over
    metrics: signal(null),
    names: signal([]),
    shown: signal([]), // metrics that are drawn
    cost: signal(null),
    reserved: signal(null), // the same steps on machines that are held
    costSteps: signal(null),
    events: signal([]), // newest first
    older: signal(null), // `before` of the next page; null: there is none
    tick: signal(0), // counts changes of replicas
    steps: signal(0), // counts commits
  };
  const dirty = new Set();
  let timer = null;
  let stop = () => {};
  let closed = false;

  const refresh = {
    async job() {
      store.job.value = await source.job();
    },
    async metrics() {
      if (!store.shown.value.length) {
        store.names.value = (await source.metrics(["training/"], 1)).names;
        return;
      }
      const found = await source.metrics(store.shown.value, POINTS);
      batch(() => {
        store.metrics.value = found;
        if (found.names) store.names.value = found.names;
      });
    },
    async cost() {
      const [cost, steps, reserved] = await Promise.all([source.cost(), source.costSteps(400), source.reserved()]);
      batch(() => {
        store.cost.value = cost;
        store.costSteps.value = steps;
        store.reserved.value = reserved;
      });
    },
    async steps() {
      store.steps.value += 1;
    },
    async replicas() {
      store.tick.value += 1;
    },
    async missed() {
      await loadEvents();
    },
  };

  function soon(...parts) {
    for (const part of parts) dirty.add(part);
    timer ??= setTimeout(async () => {
      timer = null;
      const now = [...dirty];
      dirty.clear();
      await Promise.allSettled(now.map((part) => refresh[part]()));
    }, SOON_MS);
  }

  function heard(event) {
    if (event.type !== "stage") store.events.value = [event, ...store.events.value];
    if (event.type === "stage") soon("job", "replicas");
    else if (event.type === "step") soon("job", "metrics", "cost", "steps", "replicas");
    else soon("job", "replicas", "metrics");
  }

  function listen(after) {
    stop = follow(id, after, {
      event: heard,
      state(state) {
        if (closed || store.connection.value === state) return;
        const back = store.connection.value === "away" && state === "live";
        store.connection.value = state;
        if (back) soon("job", "metrics", "cost", "steps", "replicas");
        if (state === "over") {
          soon("job", "metrics", "cost", "steps", "replicas");
          watch();
        }
      },
    });
  }

  // After the end: looks now and then whether the job goes on.
  async function watch() {
    while (!closed) {
      await new Promise((wake) => setTimeout(wake, LOOK_MS));
      if (closed) return;
      try {
        const before = store.job.value;
        await refresh.job();
        if (store.job.value.last_event > (store.events.value[0]?.id ?? before.last_event) || store.job.value.can.includes("cancel")) {
          listen(store.events.value[0]?.id ?? before.last_event);
          return;
        }
        if (store.connection.value === "away") store.connection.value = "over";
      } catch (error) {
        if (error.status === 0) store.connection.value = "away";
      }
    }
  }

  async function loadEvents() {
    const page = await source.events({ limit: 100 });
    batch(() => {
      store.events.value = page.events;
      store.older.value = page.next;
    });
  }

  store.moreEvents = async () => {
    const page = await source.events({ limit: 200, before: store.older.value });
    batch(() => {
      store.events.value = [...store.events.value, ...page.events];
      store.older.value = page.next;
    });
  };

  store.choose = (names) => {
    if (String(names) === String(store.shown.value)) return;
    const first = store.metrics.value === null;
    store.shown.value = names;
    if (first) refresh.metrics().catch(() => soon("metrics"));
    else soon("metrics");
  };

  store.poke = () => {
    stop();
    listen(store.events.value[0]?.id ?? 0);
    soon("job");
  };

  store.close = () => {
    closed = true;
    stop();
    clearTimeout(timer);
  };

  store.open = async () => {
    try {
      const names = source.metrics(["training/"], 1); // what there is, while the job is asked for
      await refresh.job();
      store.names.value = (await names).names;
    } catch (problem) {
      store.failure.value = problem;
      if (problem.status === 0 && !closed) setTimeout(() => !closed && store.open(), 2000);
      return;
    }
    store.failure.value = null;
    const first = store.job.value.last_event;
    await Promise.allSettled([refresh.metrics(), refresh.cost(), loadEvents()]);
    store.tick.value += 1;
    if (!source.fixed && !closed) listen(Math.max(first, store.events.value[0]?.id ?? 0));
  };
  return store;
}
