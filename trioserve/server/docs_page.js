"use strict";

const access = document.getElementById("access");
const message = document.getElementById("message");

/** Show the description; ask for a key if the server wants one. */
async function load(key) {
  message.textContent = "";
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  let response;
  try {
    response = await fetch("openapi.json", { headers });
  } catch (error) {
    message.textContent = `The description could not be loaded: ${error.message}`;
    return;
  }
  access.hidden = response.status !== 401;
  if (response.status === 401) {
    message.textContent = key ? "The API key is wrong." : "This server wants an API key.";
    return;
  }
  if (!response.ok) {
    message.textContent = `The description could not be loaded: the server answered ${response.status}.`;
    return;
  }
  show(await response.json(), key);
}

function show(description, key) {
  // The application may be mounted below another path than "/".
  const base = new URL(".", document.baseURI).pathname.replace(/\/$/, "");
  const ui = SwaggerUIBundle({
    spec: { ...description, servers: [{ url: base || "/" }] },
    dom_id: "#description",
    defaultModelsExpandDepth: 0,
    validatorUrl: null, // it would be asked over the network
    onComplete() {
      if (key) {
        ui.preauthorizeApiKey("ApiKey", key);
      }
    },
  });
}

access.addEventListener("submit", (event) => {
  event.preventDefault();
  load(document.getElementById("key").value);
});

load("");
