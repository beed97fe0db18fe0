/* Terminal of the console: xterm.js over the WebSocket of the stream server (leases/stream_server/terminals.py). */
"use strict";

(() => {
  const FIRST_RETRY_MS = 500, LAST_RETRY_MS = 10000;
  const page = document.getElementById("lh-terminal");
  const status = document.getElementById("lh-terminal-status");
  const isViewOnly = page.dataset.viewOnly === "true";
  const terminal = new Terminal({ cursorBlink: !isViewOnly, disableStdin: isViewOnly, scrollback: 10000, fontSize: 14 });
  const fit = new FitAddon.FitAddon();
  const encoder = new TextEncoder();
  let socket = null, received = 0, retry = FIRST_RETRY_MS, hasEnded = false;

  function show(text) { status.textContent = text; }

  function isOpen() { return socket !== null && socket.readyState === WebSocket.OPEN; }

  function sendSize() {
    if (isOpen() && !isViewOnly) {
      socket.send(JSON.stringify({ type: "resize", rows: terminal.rows, columns: terminal.cols }));
    }
  }

  function handle(message) {
    if (message.type === "gap") {
      received += message.lost_bytes;
      terminal.write(`\r\n[${message.lost_bytes} bytes of output were dropped]\r\n`);
    } else if (message.type === "exit") {
      hasEnded = true;
      show(`The program has ended with exit code ${message.exit_code}.`);
    }
  }

  function connect() {
    socket = new WebSocket(`${page.dataset.url}?offset=${received}`);
    socket.binaryType = "arraybuffer";
    socket.onopen = () => {
      retry = FIRST_RETRY_MS;
      show(isViewOnly ? "Connected, view only." : "Connected.");
      sendSize();
    };
    socket.onmessage = (event) => {
      if (typeof event.data === "string") {
        handle(JSON.parse(event.data));
      } else {
        received += event.data.byteLength;
        terminal.write(new Uint8Array(event.data));
      }
    };
    socket.onclose = (event) => {
      if (hasEnded) return;
      if (event.code === 4410 || event.code === 4403 || event.code === 4400) {
        hasEnded = true;
        show(event.reason || "The terminal has ended.");
        return;
      }
      show("Disconnected. Trying again. Reload the page if this does not end.");
      setTimeout(connect, retry);
      retry = Math.min(retry * 2, LAST_RETRY_MS);
    };
  }

  terminal.loadAddon(fit);
  terminal.open(page);
  fit.fit();
  terminal.onData((data) => { if (isOpen()) socket.send(encoder.encode(data)); });
  terminal.onBinary((data) => { if (isOpen()) socket.send(Uint8Array.from(data, (character) => character.charCodeAt(0))); });
  terminal.onResize(sendSize);
  if (!isViewOnly) window.addEventListener("resize", () => fit.fit());
  connect();
  terminal.focus();
})();
