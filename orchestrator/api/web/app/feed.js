// A job's events as they come: server-sent events over fetch (EventSource cannot send a token), taken up after a break
// with Last-Event-ID, each once.
import { headers, problemOf } from "app/api.js";

const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 5000;

// Calls `on.event(event)` in order; `on.state("live" | "away" | "over")` when that changes. Returns how to stop it.
export function follow(job, after, on) {
  const stopped = new AbortController();
  let seen = after;
  let waitMs = FIRST_WAIT_MS;

  async function connect() {
    const response = await fetch(`/v1/jobs/${job}/events`, {
      headers: headers({ "Last-Event-ID": String(seen), Accept: "text/event-stream" }),
      signal: stopped.signal,
      cache: "no-store",
    });
    if (response.status === 204) return "over";
    if (!response.ok) throw await problemOf(response);
    on.state("live");
    waitMs = FIRST_WAIT_MS;
    for await (const frame of frames(response.body)) {
      if (frame.data === null) continue; // a comment, to keep the connection
      const event = JSON.parse(frame.data);
      if (event.id <= seen) continue;
      seen = event.id;
      on.event(event);
    }
    return "ended"; // by the server: it restarts, or nothing more will come, which the next answer says
  }

  async function run() {
    while (!stopped.signal.aborted) {
      try {
        if ((await connect()) === "over") {
          on.state("over");
          return;
        }
        waitMs = FIRST_WAIT_MS;
      } catch (error) {
        if (stopped.signal.aborted) return;
        if (error.status >= 400 && error.status < 500) {
          on.state("over");
          return;
        }
        on.state("away");
        waitMs = Math.min(LONGEST_WAIT_MS, 2 * waitMs);
      }
      await new Promise((wake) => setTimeout(wake, waitMs));
    }
  }
  run();
  return () => stopped.abort();
}

// https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation, as far as the server goes
async function* frames(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += value;
    const parts = text.split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      const lines = part.split("\n").filter((line) => line.startsWith("data:"));
      yield { data: lines.length ? lines.map((line) => line.slice(5).trimStart()).join("\n") : null };
    }
  }
}
