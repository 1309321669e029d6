// Server-sent events of a POST, as objects, one by one.

export class Refused extends Error {
  constructor(status, said) {
    super(said?.message ?? `the server answered ${status}`);
    this.status = status;
    this.code = said?.code ?? null;
  }
}

/** The headers of every request; `key` may be empty. */
export function headers(key) {
  return key ? { "Content-Type": "application/json", Authorization: `Bearer ${key}` } : { "Content-Type": "application/json" };
}

/** Each event's object until the stream says it is done. Refused for an error object, in a status or inside the stream. */
export async function* stream(path, body, key, signal) {
  const reply = await fetch(path, { method: "POST", headers: headers(key), body: JSON.stringify(body), signal });
  if (!reply.ok) throw new Refused(reply.status, (await reply.json().catch(() => null))?.error);
  const decoder = new TextDecoder();
  const reader = reply.body.getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Refused(reply.status, { message: "the connection ended before the reply did" });
    held += decoder.decode(value, { stream: true }).replaceAll("\r\n", "\n");
    const blocks = held.split("\n\n");
    held = blocks.pop();
    for (const block of blocks) {
      const data = block.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim()).join("\n");
      if (data === "[DONE]") return;
      if (!data) continue;
      const event = JSON.parse(data);
      if (event.error) throw new Refused(reply.status, event.error);
      yield event;
    }
  }
}
