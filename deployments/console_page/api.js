// The server, as the page talks to it: JSON, server-sent events, and the key, which is only ever in memory.

let key = "";

export function useKey(value) {
  key = value;
}

/** Whether a request was refused with the key that is in use, and not with one that was given up since. */
export const isOfThisKey = (error) => error.key === key;
export const hasKey = () => key !== "";

export class ApiError extends Error {
  constructor(status, message, param, sent) {
    super(message);
    this.key = sent; // the key it was asked with
    this.status = status;
    this.param = param;
  }
}

// The page is `console` beside the API, under whatever prefix a proxy puts both.
const at = (path) => new URL(path.slice(1), document.baseURI);

function headers(extra = {}) {
  return key === "" ? extra : { ...extra, Authorization: `Bearer ${key}` };
}

async function failure(response, sent) {
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    // Not ours: a proxy's page, say. The status tells.
  }
  return new ApiError(response.status, error.message ?? `The server answered ${response.status}.`, error.param, sent);
}

export async function getState(signal) {
  const sent = key;
  const response = await fetch(at("/console/state"), { headers: headers(), cache: "no-store", signal });
  if (!response.ok) throw await failure(response, sent);
  return response.json();
}

/** Chunks of a streamed answer, parsed; ends after [DONE], throws ApiError for an error event. */
export async function* streamed(path, body, signal) {
  const sent = key;
  const response = await fetch(at(path), {
    method: "POST",
    headers: headers({ "Content-Type": "application/json" }),
    body: JSON.stringify(body),
    signal,
  });
  if (!response.ok) throw await failure(response, sent);
  let isWhole = false;
  for await (const data of events(response.body)) {
    // Read to the end all the same: a body given up before it has ended is a request that failed.
    if (data === "[DONE]") isWhole = true;
    if (isWhole) continue;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(200, chunk.error.message, chunk.error.param);
    yield chunk;
  }
  if (!isWhole) throw cutOff();
}

const cutOff = () => new ApiError(200, "The answer ended early: the connection to the server was lost.");

async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const line = part.split("\n").find((one) => one.startsWith("data:"));
        if (line !== undefined) yield line.slice(5).trimStart();
      }
    }
  } catch (error) {
    throw error.name === "AbortError" ? error : cutOff();
  } finally {
    await reader.cancel().catch(() => {});
  }
}
