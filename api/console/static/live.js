// Keeps a page fresh: loads again and again while the page is shown, waits longer while the server is away, and goes on
// by itself when it is back.

import { events, fetchApi } from "./http.js";

const LONGEST_S = 30;

/** Runs `load`, then `show` with its result, every `every` seconds until `signal` aborts. */
export function live({ load, show, every, signal, failed }) {
  let timer = 0;
  let failures = 0;
  let isRunning = false;

  async function round() {
    clearTimeout(timer);
    if (signal.aborted || isRunning) return;
    isRunning = true;
    let wait = every;
    try {
      const found = await load(signal);
      if (signal.aborted) return;
      failures = 0;
      show(found);
    } catch (error) {
      if (signal.aborted || error.name === "AbortError") return;
      failures += 1;
      failed?.(error);
      if (!error.status && error.status !== 0) throw error; // a fault of this page
      if (error.status === 404 || error.status === 403) return;
      wait = pause(failures, error);
    } finally {
      isRunning = false;
    }
    if (!signal.aborted && !document.hidden) timer = setTimeout(round, wait * 1000);
  }

  const wake = () => { if (!document.hidden) round(); };
  document.addEventListener("visibilitychange", wake, { signal });
  window.addEventListener("online", wake, { signal });
  signal.addEventListener("abort", () => clearTimeout(timer));
  round();
  return round;
}

/** Seconds until the next try after this many failures in a row. */
export function pause(failures, error) {
  const wanted = Math.max(error.retryAfter ?? 0, 2 ** Math.min(failures - 1, 5));
  return Math.min(LONGEST_S, wanted) * (0.8 + Math.random() * 0.4);
}

/** Shows each event `name` of a stream until `signal` aborts. Opens the stream again when it breaks. */
export function follow({ path, name, show, signal, failed }) {
  let timer = 0;
  let failures = 0;
  let stream = null;

  async function open() {
    clearTimeout(timer);
    if (signal.aborted || document.hidden || stream) return;
    const own = stream = new AbortController();
    let wait = 1;
    try {
      const answer = await fetchApi("GET", path, { signal: AbortSignal.any([signal, own.signal]) });
      for await (const event of events(answer)) {
        failures = 0;
        if (event.event === name) show(JSON.parse(event.data));
      }
    } catch (error) {
      if (signal.aborted || own.signal.aborted) return;
      failures += 1;
      wait = pause(failures, error);
      failed(error);
      if (error.status === 404 || error.status === 403) return;
    } finally {
      stream = null;
    }
    timer = setTimeout(open, wait * 1000);
  }

  const turn = () => {
    if (document.hidden) stream?.abort();
    else open();
  };
  document.addEventListener("visibilitychange", turn, { signal });
  window.addEventListener("online", turn, { signal });
  signal.addEventListener("abort", () => clearTimeout(timer));
  open();
  return () => { stream?.abort(); stream = null; open(); };
}
