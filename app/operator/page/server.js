// What the page asks of the server: JSON, and server-sent events with an API key (an EventSource cannot send one).
// Owns the key, which lives in sessionStorage, and the parsing of events.

const KEY = "tokenferry.key";

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => sessionStorage.setItem(KEY, value),
};

/** A refusal, with what the server said about it. */
export class Refused extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** Throws Refused, or what `fetch` throws. */
export async function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (key.get()) headers.authorization = `Bearer ${key.get()}`;
  if (options.body) headers["content-type"] = "application/json";
  const response = await fetch(path, { ...options, headers, cache: "no-store" });
  if (response.ok) return response;
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    // Not from us: a proxy in between.
  }
  throw new Refused(response.status, error.code, error.message ?? `The server answered ${response.status}.`);
}

/** The data of each event of a response, as texts. Comments and ids are skipped. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      rest += value;
      const blocks = rest.split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const data = block.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6));
        if (data.length) yield data.join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
