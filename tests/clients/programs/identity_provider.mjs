// A real OpenID Connect provider on a free port of this machine, with a console's client and a command line's.
// Usage: node identity_provider.mjs REDIRECT_URI. Prints its issuer, as one line of JSON, when it listens.
// A line on standard input, "rotate", replaces its signing keys; it then prints {"rotated": KID}.

import { createServer } from "node:http";
import { generateKeyPairSync } from "node:crypto";
import { createInterface } from "node:readline";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const require = createRequire(`${process.cwd()}/`);
const { Provider } = await import(pathToFileURL(require.resolve("oidc-provider")));

function signingKey(kid) {
  const { privateKey } = generateKeyPairSync("ec", { namedCurve: "P-256" });
  return { ...privateKey.export({ format: "jwk" }), kid, use: "sig", alg: "ES256" };
}

const accounts = { findAccount: (_, id) => ({ accountId: id, claims: () => ({ sub: id, email: `${id}@example.com`, email_verified: true, groups: [`${id}s`] }) }) };

function configuration(key) {
  return {
    ...accounts,
    jwks: { keys: [key] },
    clients: [
      { client_id: "console", client_secret: "a secret of the console & more", redirect_uris: [process.argv[2]], id_token_signed_response_alg: "ES256" },
      {
        client_id: "cli", token_endpoint_auth_method: "none", application_type: "native", redirect_uris: [], response_types: [],
        grant_types: ["urn:ietf:params:oauth:grant-type:device_code", "refresh_token"], id_token_signed_response_alg: "ES256",
      },
    ],
    claims: { openid: ["sub", "groups"], email: ["email", "email_verified"] },
    conformIdTokenClaims: false,
    features: { deviceFlow: { enabled: true }, devInteractions: { enabled: true } },
    cookies: { keys: ["a key of a test"] },
    pkce: { required: () => true },
  };
}

let answer = null;
const server = createServer((request, response) => answer(request, response));
server.listen(0, "127.0.0.1", () => {
  const issuer = `http://127.0.0.1:${server.address().port}`;
  const serve = (kid) => { answer = new Provider(issuer, configuration(signingKey(kid))).callback(); };
  serve("first");
  console.log(JSON.stringify({ issuer }));
  let count = 0;
  createInterface({ input: process.stdin }).on("line", (line) => {
    if (line !== "rotate") return;
    count += 1;
    serve(`rotated-${count}`);
    console.log(JSON.stringify({ rotated: `rotated-${count}` }));
  }).on("close", () => process.exit(0));
});
