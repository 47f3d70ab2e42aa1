// Try a classifier on a drawing or a picture.

import { $, askJson, el, problem } from "./dom.js";

const MOST_SHOWN = 5, SIDE = 280;
let job = null, limit = Infinity;
let ink = null; // of the pen: a stroke under way
let turn = 0;
const pen = $("paper").getContext("2d", { willReadFrequently: true });

export const limitTo = (bytes) => (limit = bytes);

export function forget() {
  job = null;
  $("try-empty").hidden = false;
  $("try-body").hidden = true;
  problem($("try-problem"), null);
}

export function use(trained) {
  job = trained;
  $("try-empty").hidden = true;
  $("try-body").hidden = false;
  clear();
}

function colours() {
  return job.draw.dark ? ["#000", "#fff"] : ["#fff", "#000"];
}

function clear() {
  turn++;
  [pen.fillStyle, pen.strokeStyle] = colours();
  pen.fillRect(0, 0, SIDE, SIDE);
  pen.lineCap = pen.lineJoin = "round";
  pen.lineWidth = SIDE * Math.max(0.07, 1.1 / job.draw.side); // about as thick as the images have it
  $("answer").replaceChildren(el("p", { className: "quiet" }, "Draw, or choose a picture."));
  problem($("try-problem"), null);
}

function place(event) {
  const box = $("paper").getBoundingClientRect();
  return [((event.clientX - box.left) * SIDE) / box.width, ((event.clientY - box.top) * SIDE) / box.height];
}

function begin(event) {
  if (!job || event.button) return;
  $("paper").setPointerCapture(event.pointerId);
  ink = place(event);
  stroke(event);
}

function stroke(event) {
  if (!ink) return;
  const next = place(event);
  pen.beginPath();
  pen.moveTo(...ink);
  pen.lineTo(...next);
  pen.stroke();
  ink = next;
}

function end() {
  if (!ink) return;
  ink = null;
  const png = atob(fitted().toDataURL("image/png").split(",")[1]); // at once: toBlob waits until the browser is idle
  classify(new Blob([Uint8Array.from(png, (letter) => letter.charCodeAt(0))]), true);
}

/** The drawing, cut to what is drawn, as images of a dataset are. */
function fitted() {
  const { data } = pen.getImageData(0, 0, SIDE, SIDE);
  const paper = job.draw.dark ? 0 : 255;
  let [left, top, right, bottom] = [SIDE, SIDE, 0, 0];
  for (let y = 0; y < SIDE; y++) {
    for (let x = 0; x < SIDE; x++) {
      if (Math.abs(data[4 * (y * SIDE + x)] - paper) < 32) continue;
      [left, right, top, bottom] = [Math.min(left, x), Math.max(right, x), Math.min(top, y), Math.max(bottom, y)];
    }
  }
  const margin = job.draw.side > 16 ? 0.18 : 0.03; // MNIST's is 4 of 28 pixels; smaller images leave none
  const side = Math.max(right - left, bottom - top, SIDE / 5) * (1 + 2 * margin);
  const canvas = el("canvas", { width: SIDE, height: SIDE });
  const copy = canvas.getContext("2d");
  [copy.fillStyle] = colours();
  copy.fillRect(0, 0, SIDE, SIDE);
  copy.drawImage($("paper"), (left + right - side) / 2, (top + bottom - side) / 2, side, side, 0, 0, SIDE, SIDE);
  return canvas;
}

function upload(file) {
  if (!file || !job) return;
  clear();
  if (file.size > limit) problem($("try-problem"), `the file is too large: at most ${limit >> 20} MB`);
  else classify(file);
}

async function classify(blob, isDrawn = false) {
  const mine = ++turn;
  problem($("try-problem"), null);
  $("answer").setAttribute("aria-busy", true);
  try {
    const options = { method: "POST", headers: { "Content-Type": "application/octet-stream" }, body: blob };
    const answer = await askJson(`/api/trainings/${job.id}/classify`, options);
    if (mine === turn) show(answer, isDrawn);
  } catch (error) {
    if (mine !== turn) return;
    $("answer").replaceChildren();
    problem($("try-problem"), error);
  } finally {
    $("answer").setAttribute("aria-busy", false);
  }
}

function show(answer, isDrawn) {
  const rows = job.class_names.map((name, i) => [name, answer.probabilities[i]]).sort((a, b) => b[1] - a[1]).slice(0, MOST_SHOWN);
  const bars = rows.map(([name, share]) => {
    const bar = el("i");
    bar.style.width = `${100 * share}%`;
    const percent = el("span", { className: "share" }, `${(100 * share).toFixed(1)} %`);
    return el("li", {}, el("span", { className: "name", title: name }, name), el("span", { className: "bar" }, bar), percent);
  });
  const seen = el("figure", {}, el("img", { className: "pixels", src: answer.seen, alt: "the picture as the network sees it" }), el("figcaption", {}, "as the network sees it"));
  const notice = answer.notice && !isDrawn ? [el("p", { className: "quiet" }, `the picture was ${answer.notice}`)] : [];
  const heading = el("p", { className: "tile" }, "It is ", el("strong", { id: "answered" }, answer.class_name));
  $("answer").replaceChildren(heading, el("ol", { className: "bars" }, ...bars), seen, ...notice);
}

const paper = $("paper");
paper.addEventListener("pointerdown", begin);
paper.addEventListener("pointermove", stroke);
paper.addEventListener("pointerup", end);
paper.addEventListener("pointercancel", end);
$("clear").addEventListener("click", clear);
$("file").addEventListener("change", () => {
  upload($("file").files[0]);
  $("file").value = "";
});
const target = $("try");
target.addEventListener("dragover", (event) => {
  event.preventDefault();
  target.classList.add("over");
});
target.addEventListener("dragleave", () => target.classList.remove("over"));
target.addEventListener("drop", (event) => {
  event.preventDefault();
  target.classList.remove("over");
  upload(event.dataTransfer.files[0]);
});
