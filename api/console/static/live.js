// Keeps a page fresh: loads again and again while the page is shown, waits longer while the server is away, and goes on
// by itself when it is back.

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
      wait = Math.min(LONGEST_S, Math.max(error.retryAfter ?? 0, 2 ** Math.min(failures - 1, 5))) * (0.8 + Math.random() * 0.4);
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
