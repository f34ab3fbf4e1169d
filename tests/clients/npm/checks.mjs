// What the checks of the openai package share: node SCRIPT BASE_URL FOLDER, where FOLDER has node_modules.
import { createRequire } from "node:module";

const [baseURL, folder] = process.argv.slice(2);

export const openai = createRequire(`${folder}/x.js`)("openai");
export const client = new openai.OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
export const messages = [{ role: "user", content: "How is the weather?" }];

/** Prints the names of the checks; the first that fails ends the process with its name. */
export async function run(checks) {
  for (const [name, check] of Object.entries(checks)) {
    try {
      await check();
    } catch (error) {
      console.error(`${name}: ${error.stack}`);
      process.exit(1);
    }
  }
  console.log(JSON.stringify(Object.keys(checks)));
}
