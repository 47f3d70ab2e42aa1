// Build a classifier: pick classes, train, watch, and see what came out.

import { $, ask, askJson, count, el, problem } from "./dom.js";
import { forget, use } from "./try.js";

const MOST_NUMBERED = 20; // classes of a confusion matrix whose cells have room for numbers
let memories = [];
let picked = []; // "memory:label", in the order they were picked
let training = null, losses = [], stream = null;
let isNetworkChosen = false; // by hand

export function offer(shelf) {
  memories = shelf.memories.filter((memory) => memory.classes.length);
  $("build").hidden = $("try").hidden = memories.length === 0;
  $("choices").replaceChildren(...memories.map(choices));
  update();
}

function choices(memory) {
  const boxes = memory.classes.map((name, label) => {
    const box = el("input", { type: "checkbox", value: `${memory.id}:${label}` });
    box.addEventListener("change", () => pick([box], box.checked));
    return el("label", { className: "chip" }, box, el("span", {}, name));
  });
  const all = () => boxes.map((label) => label.firstChild);
  const every = (words, wanted) => {
    const button = el("button", { type: "button", className: "link", aria: { label: `${words} of ${memory.name}` } }, words);
    button.addEventListener("click", () => pick(all(), wanted));
    return button;
  };
  const buttons = el("span", { className: "row" }, every("all", true), every("none", false));
  const heading = el("div", { className: "between" }, el("span", { className: "quiet" }, `of ${memory.dataset}`), buttons);
  return el("fieldset", {}, el("legend", {}, memory.name), heading, el("div", { className: "chips" }, ...boxes));
}

function pick(boxes, wanted) {
  for (const box of boxes) {
    box.checked = wanted;
    picked = picked.filter((choice) => choice !== box.value);
    if (wanted) picked.push(box.value);
  }
  update();
}

function update() {
  const from = picked.map((choice) => memories.find((memory) => memory.id === Number(choice.split(":")[0])));
  const images = Math.max(0, ...from.map((memory) => memory.matrices)) * picked.length;
  const [first] = [...from, ...memories];
  if (first) $("network").options[0].textContent = `the memory's own (${first.network})`;
  if (first && !isNetworkChosen) $("network").value = first.network.startsWith("mlp") ? "memory" : "small"; // seconds, not minutes
  const words = { 0: "Pick two classes or more.", 1: "Pick one class more." };
  $("picked").textContent = words[picked.length] ?? `${picked.length} classes, ${count(images, "recalled image")}`;
  $("train").disabled = picked.length < 2 || isUnderWay();
}

const isUnderWay = () => training !== null && ["waiting", "training", "testing"].includes(training.state);

function order() {
  const found = { classes: picked, network: $("network").value, seed: Number($("seed").value) };
  return $("epochs").value ? { ...found, epochs: Number($("epochs").value) } : found;
}

async function train(event) {
  event.preventDefault();
  problem($("build-problem"), null);
  $("train").disabled = true;
  try {
    const options = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(order()) };
    watch(await askJson("/api/trainings", options));
  } catch (error) {
    problem($("build-problem"), error);
  }
  update();
}

/** Follow a training until it is finished. */
export function watch(job) {
  stream?.close();
  losses = [];
  forget();
  $("result").hidden = true;
  $("progress").hidden = false;
  show(job);
  stream = new EventSource(`/api/trainings/${job.id}/events`);
  stream.onmessage = (event) => {
    problem($("build-problem"), null);
    const news = JSON.parse(event.data);
    losses.length = news.losses_from;
    losses.push(...news.losses);
    show(news);
    if (!isUnderWay()) finish(news);
  };
  stream.onerror = () => {
    if (stream.readyState === EventSource.CLOSED) lost();
    else problem($("build-problem"), "the studio does not answer: waiting for it");
  };
}

function lost() {
  problem($("build-problem"), "the studio no longer knows this training, or does not answer: train again");
  training = null;
  $("cancel").hidden = $("progress").hidden = true;
  update();
}

function show(job) {
  training = job;
  const words = {
    waiting: "Waiting for its turn",
    training: `Training on ${count(job.images, "image")} of ${count(job.class_names.length, "class", "classes")}`,
    testing: "Testing",
    done: "Trained",
    failed: "It failed",
    cancelled: "Cancelled",
  };
  if ($("status").textContent !== words[job.state]) $("status").textContent = words[job.state]; // read aloud once each
  $("bar").value = job.state === "done" ? 1 : job.epochs ? job.epoch / job.epochs : 0;
  $("bar").textContent = `${job.epoch} of ${job.epochs}`;
  const loss = losses.length ? `, loss ${losses.at(-1)[1].toPrecision(3)}` : "";
  $("numbers").textContent = job.epochs ? `epoch ${job.epoch} of ${job.epochs}${loss}, ${job.seconds.toFixed(1)} s${left(job)}` : "";
  $("cancel").hidden = !isUnderWay();
  $("progress").dataset.state = job.state;
  curve();
  update();
}

/** In words, where there is time to read them. */
function left({ state, epoch, epochs, seconds }) {
  const more = state === "training" && epoch ? (seconds / epoch) * (epochs - epoch) : 0;
  return more < 5 ? "" : more < 90 ? `, about ${Math.round(more)} s left` : `, about ${Math.round(more / 60)} min left`;
}

function curve() {
  const most = Math.max(...losses.map(([, loss]) => loss), 1e-9);
  const across = (epoch) => ((300 * (epoch - 1)) / Math.max(1, training.epochs - 1)).toFixed(1);
  $("curve-line").setAttribute("d", losses.map(([epoch, loss], i) => `${i ? "L" : "M"}${across(epoch)} ${(78 - (76 * loss) / most).toFixed(1)}`).join(""));
}

function finish(job) {
  stream.close();
  if (job.state === "failed") problem($("build-problem"), job.error);
  if (job.state !== "done") return;
  use(job);
  $("result").replaceChildren(...result(job));
  $("result").hidden = false;
}

function result(job) {
  const parts = [];
  if (job.notice) parts.push(el("p", { className: "quiet" }, job.notice));
  if (job.test?.error) parts.push(el("p", { className: "quiet" }, `Not tested: ${job.test.error}`));
  else if (job.test) parts.push(...tested(job));
  else parts.push(el("p", { className: "quiet" }, "No test data is at hand: start the studio with --data to see the accuracy."));
  if (job.whitening) parts.push(el("p", { className: "quiet" }, `The classifier needs ${job.whitening} beside it: it lies beside the memory.`));
  parts.push(downloads(job));
  return parts;
}

function tested({ test, class_names: names }) {
  const of = test.of === test.images ? count(test.images, "test image") : `${test.images} of ${test.of} test images`;
  const tile = el("p", { className: "tile" }, el("strong", { id: "accuracy" }, `${test.accuracy.toFixed(1)} %`), ` right, of ${of}`);
  return [tile, el("h3", {}, "What it takes for what"), el("div", { className: "scroll", tabIndex: 0, role: "region", aria: { label: "confusion matrix" } }, confusion(test.confusion, names))];
}

function confusion(counts, names) {
  const few = names.length <= MOST_NUMBERED;
  const head = el("tr", {}, el("td"), ...names.map((name) => el("th", { scope: "col", title: name }, few ? name : "")));
  const rows = counts.map((row, truth) => {
    const total = row.reduce((a, b) => a + b, 0) || 1;
    const cells = row.map((number, answer) => {
      const cell = el("td", { title: `${names[truth]} taken for ${names[answer]}: ${number}` }, few && number ? String(number) : "");
      cell.style.setProperty("--share", `${Math.round(100 * Math.sqrt(number / total))}%`); // few are seen too
      cell.className = truth === answer ? "right" : "wrong";
      return cell;
    });
    return el("tr", {}, el("th", { scope: "row", title: names[truth] }, few ? names[truth] : ""), ...cells);
  });
  const caption = el("caption", {}, "rows: what it is; columns: what it is taken for");
  return el("table", { className: few ? "confusion" : "confusion dense" }, caption, el("thead", {}, head), el("tbody", {}, ...rows));
}

function downloads(job) {
  const { classes, ...how } = job.order;
  const query = new URLSearchParams([...classes.map((choice) => ["classes", choice]), ...Object.entries(how)]);
  const link = (words, href, name) => el("a", { className: "button", href, download: name }, words);
  const code = el("pre", {}, el("code", {}, ""));
  const lines = el("details", {}, el("summary", {}, "The Python lines that do the same"), code);
  lines.addEventListener("toggle", async () => {
    if (lines.open) code.firstChild.textContent = await ask(`/api/lines.py?${query}`).then((found) => found.text(), (error) => `# ${error.message}`);
  });
  return el("div", {}, el("div", { className: "row" },
    link("Classifier", `/api/trainings/${job.id}/classifier.safetensors`, "classifier.safetensors"),
    link("Recalled set", `/api/recalled.npz?${query}`, "recalled.npz"),
    link("Python", `/api/lines.py?${query}`, "classifier.py"),
  ), lines);
}

async function cancel() {
  if (!training) return;
  try {
    const job = await askJson(`/api/trainings/${training.id}`, { method: "DELETE" });
    stream?.close();
    show(job);
    $("train").focus();
  } catch (error) {
    problem($("build-problem"), error);
  }
}

$("order").addEventListener("submit", train);
$("cancel").addEventListener("click", cancel);
$("network").addEventListener("change", () => (isNetworkChosen = true));
