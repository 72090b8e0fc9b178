// A client of kvstored in another language. It has the .proto files and protos/README.md, and nothing else
// of ours: what it can do, any language with gRPC and xxh3-64 can.
//
//   node client.js put TARGET DIGEST BLOCK_BYTES FILE KEY...    stores FILE's blocks under KEYs, a chain
//   node client.js get TARGET DIGEST BLOCK_BYTES FILE KEY...    writes the leading blocks that are there to FILE
//   node client.js call TARGET METHOD JSON                      one call of the service
//   node client.js health TARGET SERVICE                        grpc.health.v1
//
// TARGET is HOST:PORT or unix:/PATH; digests and keys are in hex. One line of JSON is printed; a call that
// fails prints {"code": ..., "details": ...}.
'use strict';

const fs = require('node:fs');
const path = require('node:path');
const grpc = require('@grpc/grpc-js');
const loader = require('@grpc/proto-loader');
const { createXXHash3 } = require('hash-wasm');

const PROTOS = path.join(__dirname, '..', '..', 'protos');
const CHUNK_BYTES = 1 << 20;
const MESSAGE_BYTES_MAX = 4 << 20;
const DEADLINE_MS = 20000;

function load(file, folder) {
  const options = { keepCase: true, longs: String, enums: String, defaults: true, oneofs: true, includeDirs: [folder] };
  return grpc.loadPackageDefinition(loader.loadSync(path.join(folder, file), options));
}

function connect(Service, target) {
  return new Service(target, grpc.credentials.createInsecure(), {
    'grpc.max_receive_message_length': MESSAGE_BYTES_MAX,
  });
}

function metadata() {
  const found = new grpc.Metadata();
  found.set('kvstored-client', 'node');
  found.set('kvstored-protocol', '1');
  return found;
}

const deadline = () => ({ deadline: Date.now() + DEADLINE_MS });

function call(client, method, request) {
  return new Promise((resolve, reject) =>
    client[method](request, metadata(), deadline(), (error, reply) => (error ? reject(error) : resolve(reply))));
}

// xxh3-64 as the decimal text that stands for a fixed64.
function checksum(hasher, bytes) {
  return BigInt('0x' + hasher.init().update(bytes).digest('hex')).toString();
}

async function openNamespace(client, digest, blockBytes) {
  const reply = await call(client, 'OpenNamespace', {
    digest: Buffer.from(digest, 'hex'), block_bytes: blockBytes, label: 'node',
  });
  return reply.namespace_id;
}

async function put(client, digest, blockBytes, file, ...names) {
  const hasher = await createXXHash3();
  const bytes = fs.readFileSync(file);
  const keys = names.map((name) => Buffer.from(name, 'hex'));
  const number = await openNamespace(client, digest, Number(blockBytes));
  return new Promise((resolve, reject) => {
    const stream = client.Put(metadata(), deadline(), (error, reply) => (error ? reject(error) : resolve(reply)));
    stream.write({
      header: {
        namespace_id: number,
        keys,
        parents: keys.map((_, i) => (i ? keys[i - 1] : Buffer.alloc(0))),
        depths: keys.map((_, i) => i),
      },
    });
    for (let i = 0; i < keys.length; i++) {
      const block = bytes.subarray(i * Number(blockBytes), (i + 1) * Number(blockBytes));
      for (let at = 0; at < block.length; at += CHUNK_BYTES) {
        const last = at + CHUNK_BYTES >= block.length;
        const data = block.subarray(at, at + CHUNK_BYTES);
        stream.write(last ? { data, checksum: checksum(hasher, block) } : { data });
      }
    }
    stream.end();
  });
}

async function get(client, digest, blockBytes, file, ...names) {
  const hasher = await createXXHash3();
  const number = await openNamespace(client, digest, Number(blockBytes));
  const keys = names.map((name) => Buffer.from(name, 'hex'));
  const stream = client.Get({ namespace_id: number, keys }, metadata(), deadline());
  const blocks = [];
  let announced = -1;
  let pieces = [];
  for await (const chunk of stream) {
    if (announced < 0) {
      announced = chunk.blocks;
      continue;
    }
    pieces.push(chunk.data);
    if (chunk._checksum !== 'checksum') continue;
    const block = Buffer.concat(pieces);
    if (checksum(hasher, block) !== chunk.checksum) throw new Error('a block does not match its checksum');
    blocks.push(block);
    pieces = [];
  }
  fs.writeFileSync(file, Buffer.concat(blocks));
  return { announced, blocks: blocks.length };
}

async function main([command, target, ...rest]) {
  if (command === 'health') {
    const client = connect(load('health.proto', __dirname).grpc.health.v1.Health, target);
    return call(client, 'Check', { service: rest[0] });
  }
  const client = connect(load('kvstored/v1/kvstore.proto', PROTOS).kvstored.v1.KVStore, target);
  if (command === 'call') return call(client, rest[0], JSON.parse(rest[1]));
  return { put, get }[command](client, ...rest);
}

main(process.argv.slice(2))
  .catch((error) => ({ code: grpc.status[error.code] || String(error), details: error.details || '' }))
  .then((answer) => process.stdout.write(JSON.stringify(answer) + '\n', () => process.exit(0)));
