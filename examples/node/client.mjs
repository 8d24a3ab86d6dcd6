// A client from the .proto file alone: node client.mjs ADDRESS PROMPT [MAX_TOKENS]
// Streams the text to stdout, then one line of JSON with the finish reason and the usage to stderr.
import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";

const [address = "127.0.0.1:50051", prompt = "The sea is", maxTokens = "40"] = process.argv.slice(2);
const root = fileURLToPath(new URL("../../protos/", import.meta.url));
const definition = loader.loadSync("stepwire/inference/v1/inference.proto", {
  includeDirs: [root],
  longs: Number,
  enums: String,
});
const { InferenceService } = grpc.loadPackageDefinition(definition).stepwire.inference.v1;
const client = new InferenceService(address, grpc.credentials.createInsecure());

const stream = client.Generate(
  { text: prompt, sampling: { temperature: 0 }, stopping: { maxTokens: Number(maxTokens) } },
  { deadline: Date.now() + 60_000 },
);
stream.on("data", (message) => {
  process.stdout.write(message.text);
  if (message.finishReason !== "FINISH_REASON_UNSPECIFIED" && message.usage) {
    console.error(JSON.stringify({ finishReason: message.finishReason, usage: message.usage }));
  }
});
stream.on("error", (error) => {
  console.error(`${grpc.status[error.code]}: ${error.details}`);
  process.exitCode = 1;
});
stream.on("end", () => client.close());
