// The server's HTTP interface: the same that the openai client uses, and the memory map.

const KEYS = { api: "flexinfer.api-key", admin: "flexinfer.admin-key" };

const BROKEN = "The connection ended in the middle of the answer: the server has stopped, or the network is gone.";

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }

  get needsKey() {
    return this.status === 401 || this.status === 403;
  }
}

export class Api {
  #etag = null;
  #replica = null; // whose map the tag is of
  answeredBy = null; // the replica that has given the last answer, where there are several

  key(kind) {
    return sessionStorage.getItem(KEYS[kind]) ?? "";
  }

  setKey(kind, key) {
    if (key) sessionStorage.setItem(KEYS[kind], key);
    else sessionStorage.removeItem(KEYS[kind]);
    this.#etag = null;
  }

  async models() {
    return (await this.#request("v1/models")).json();
  }

  // The map, or null if nothing has changed since the last call. Where there are several replicas: of this one.
  async memory(replica = null) {
    if (replica !== this.#replica) [this.#replica, this.#etag] = [replica, null];
    const headers = this.#etag ? { "If-None-Match": this.#etag } : {};
    const key = this.key("admin") || this.key("api");
    const path = `admin/memory?max_rows=4096${replica ? `&replica=${encodeURIComponent(replica)}` : ""}`;
    const response = await this.#request(path, { headers, key, cache: "no-store" });
    if (response.status === 304) return null;
    this.#etag = response.headers.get("ETag");
    return response.json();
  }

  async wake() {
    const path = this.#replica ? `admin/wake?replica=${encodeURIComponent(this.#replica)}` : "admin/wake";
    await this.#request(path, { method: "POST", key: this.key("admin") || this.key("api") });
  }

  // Yields the chunks of a streamed chat completion. `signal` stops it, and the server's work with it.
  async *chat(body, signal) {
    const response = await this.#request("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
      signal,
    });
    this.answeredBy = response.headers.get("X-Replica");
    for await (const data of events(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(500, chunk.error.message);
      yield chunk;
    }
    throw new ApiError(0, BROKEN);
  }

  async #request(path, { headers = {}, key = this.key("api"), ...options } = {}) {
    if (key) headers = { ...headers, Authorization: `Bearer ${key}` };
    let response;
    try {
      response = await fetch(path, { headers, ...options });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError(0, "The server does not answer. Is it still running?");
    }
    if (response.ok || response.status === 304) return response;
    throw new ApiError(response.status, await errorMessage(response));
  }
}

async function errorMessage(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered ${response.status} ${response.statusText}.`;
  }
}

// The `data:` lines of server-sent events.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  try {
    for (;;) {
      const { done, value } = await reader.read().catch((error) => {
        if (error.name === "AbortError") throw error;
        throw new ApiError(0, BROKEN);
      });
      if (done) return;
      buffer += value;
      const lines = buffer.split(/\r?\n/);
      buffer = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) yield line.slice(5).trim();
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
