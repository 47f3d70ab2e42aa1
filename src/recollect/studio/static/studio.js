// The page begins here: the shelf, and whatever this browser trained last.

import { offer, watch } from "./build.js";
import { $, askJson, count, el, problem } from "./dom.js";
import { look } from "./look.js";
import { limitTo } from "./try.js";

const size = (bytes) => (bytes < 1000 ? `${bytes} bytes` : bytes < 1e6 ? `${(bytes / 1000).toFixed(1)} kB` : `${(bytes / 1e6).toFixed(1)} MB`);

function card(memory, isFirst) {
  const radio = el("input", { type: "radio", name: "memory", value: memory.id, checked: isFirst });
  radio.addEventListener("change", () => look(memory));
  const [channels, height, width] = memory.image_shape;
  const facts = [
    memory.classes.length ? count(memory.classes.length, "class", "classes") : "asked with pictures",
    `${width}×${height}${channels === 3 ? " in colour" : ""}`,
    count(memory.bases, "base"),
    size(memory.bytes),
  ];
  const accuracy = memory.accuracy ? `${memory.accuracy.mean.toFixed(1)} % on its ${memory.accuracy.on} set` : "accuracy not measured";
  const words = [
    el("strong", {}, memory.name),
    el("span", { className: "quiet" }, [memory.dataset, memory.budget].filter(Boolean).join(", ")),
    el("span", { className: "quiet" }, facts.join(" · ")),
    el("span", { className: "quiet" }, accuracy),
  ];
  return el("label", { className: "card" }, radio, el("span", { className: "words" }, ...words));
}

function empty() {
  return el("div", { className: "empty" },
    el("p", {}, "There is no memory on the shelf yet."),
    el("p", { className: "quiet" }, "Make one in two minutes, and open the studio with it:"),
    el("pre", {}, el("code", {}, "recollect demo --out runs/demo\nrecollect studio runs/demo")),
  );
}

async function start() {
  const body = $("shelf-body");
  try {
    const shelf = await askJson("/api/shelf");
    const { memories, problems, limits } = shelf;
    limitTo(limits.bytes);
    const cards = memories.map((memory, i) => card(memory, i === 0));
    const group = el("div", { className: "cards", role: "radiogroup", aria: { labelledby: "shelf-title" } }, ...cards);
    const notes = problems.map((words) => el("p", { className: "problem" }, words));
    body.replaceChildren(memories.length ? group : empty(), ...notes);
    offer(shelf);
    if (memories.length) await look(memories[0]);
    const last = (await askJson("/api/trainings")).at(-1);
    if (last && !["failed", "cancelled"].includes(last.state)) watch(last);
  } catch (error) {
    problem(body, error);
  }
  body.setAttribute("aria-busy", false);
}

start();
