// Perfetto's trace processor as its web page has it: requests on the standard input, answers on the
// standard output, as a worker of the page would exchange them. FOLDER has engine_bundle.js and
// what that loads.
//
//     node trace_processor.mjs FOLDER

import { readFileSync, writeSync } from "node:fs";

const folder = process.argv[2];

class Request {
  open(_method, url) {
    this.name = url.split("/").pop();
  }
  send() {
    this.response = readFileSync(`${folder}/${this.name}`);
  }
}

const port = {
  postMessage(bytes) {
    for (let at = 0; at < bytes.length; at += writeSync(1, bytes, at));
  },
};
const log = console.error;
const worker = { location: { href: `file://${folder}/` } };
const page = {
  self: worker,
  WorkerGlobalScope: Object,
  XMLHttpRequest: Request,
  process: undefined, // it refuses to run where it sees Node
  console: { log, warn: log, error: log },
};
const code = readFileSync(`${folder}/engine_bundle.js`, "utf8");
new Function(...Object.keys(page), code)(...Object.values(page));
worker.onmessage({ data: port });
await new Promise((resolve) => setTimeout(resolve)); // until it has begun
for await (const bytes of process.stdin) port.onmessage({ data: new Uint8Array(bytes) });
