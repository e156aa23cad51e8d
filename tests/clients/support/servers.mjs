// The two servers that benchmarks/clients.py has started.

const key = process.env.TRIOSERVE_CLIENTS_KEY ?? "sk-clients";

function endpoint(name) {
  const url = process.env[`TRIOSERVE_${name}_URL`];
  if (!url) throw new Error(`TRIOSERVE_${name}_URL is not set: run python benchmarks/clients.py`);
  return { url, api: `${url}/v1`, model: process.env[`TRIOSERVE_${name}_MODEL`], key };
}

export const text = endpoint("TEXT");
export const tools = endpoint("TOOLS");

export async function metric({ url }, name) {
  const answer = await fetch(`${url}/metrics`, { headers: { Authorization: `Bearer ${key}` } });
  const pattern = new RegExp(`^trioserve:${name}(?:\\{[^}]*\\})? (\\S+)$`, "gm");
  return [...(await answer.text()).matchAll(pattern)].reduce((sum, match) => sum + Number(match[1]), 0);
}

// Until nothing runs, waits or holds a block.
export async function idle(server) {
  const deadline = Date.now() + 30_000;
  for (const level of ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"]) {
    while ((await metric(server, level)) !== 0) {
      if (Date.now() > deadline) throw new Error(`the server is not idle: ${level}`);
      await new Promise((resolve) => setTimeout(resolve, 50));
    }
  }
}
