// Look inside a memory: its bases, what it recalls of a class, and sliders that mix the bases.

import { $, ask, askFloats, count, el, problem } from "./dom.js";
import { mix, paint, stretched, upsample } from "./recall.js";

const MOST_SLIDERS = 32, MOST_RECALLED = 60;
const loaded = new Map(); // what each base adds to a picture, by memory
let memory, pictures, shape, recalls, current, coefficients;
let turn = 0; // of the latest thing asked for: what arrives late is dropped

export async function look(chosen) {
  const mine = ++turn;
  memory = chosen;
  $("look").hidden = false;
  $("look-title").textContent = `Look inside ${memory.name}`;
  problem($("look-problem"), null);
  busy(true);
  $("look-body").inert = true; // what is shown is of another memory
  $("picture-caption").textContent = "Reading the memory …";
  try {
    if (!loaded.has(memory.id)) loaded.set(memory.id, await askFloats(`/api/memories/${memory.id}/pictures`));
    if (mine !== turn) return;
    ({ values: pictures, shape } = loaded.get(memory.id));
    $("class").replaceChildren(...memory.classes.map((name, label) => el("option", { value: label }, name)));
    $("class").disabled = memory.classes.length === 0;
    await choose(0);
  } catch (error) {
    if (mine === turn) fail(error);
  }
}

async function choose(label) {
  const mine = ++turn;
  problem($("look-problem"), null);
  busy(true);
  try {
    const K = shape[0] - 1;
    if (memory.classes.length) {
      const { values } = await askFloats(`/api/memories/${memory.id}/classes/${label}/coefficients`);
      if (mine !== turn) return;
      recalls = Array.from({ length: values.length / K }, (_, i) => values.slice(i * K, (i + 1) * K));
    } else {
      recalls = [new Float32Array(K).fill(1 / K)];
    }
    showRecalled();
    show(0);
    busy(false);
    $("look-body").inert = false;
  } catch (error) {
    if (mine === turn) fail(error);
  }
}

function busy(is) {
  $("look").setAttribute("aria-busy", is);
  $("look-body").hidden = false;
}

function fail(error) {
  $("look").setAttribute("aria-busy", false);
  $("look-body").hidden = true;
  problem($("look-problem"), error);
}

function draw(canvas, mixed) {
  const size = memory.image_shape.slice(1);
  paint(canvas, upsample(mix(pictures, shape, mixed), shape.slice(1), size), memory.image_shape);
}

function showRecalled() {
  const buttons = recalls.slice(0, MOST_RECALLED).map((each, i) => {
    const canvas = el("canvas", { className: "pixels" });
    draw(canvas, each);
    const button = el("button", { type: "button", aria: { label: `recall ${i + 1}`, pressed: false } }, canvas);
    button.addEventListener("click", () => show(i));
    return button;
  });
  $("recalled").replaceChildren(...buttons);
}

function show(number) {
  current = number;
  coefficients = Float32Array.from(recalls[number]);
  [...$("recalled").children].forEach((button, i) => button.setAttribute("aria-pressed", i === number));
  showSliders();
  redraw();
}

function showSliders() {
  const K = shape[0] - 1;
  const heaviest = Array.from(coefficients.keys()).sort((a, b) => Math.abs(coefficients[b]) - Math.abs(coefficients[a]));
  const moved = heaviest.slice(0, MOST_SLIDERS).sort((a, b) => a - b);
  $("mixer-note").textContent = memory.classes.length === 0
    ? "This memory is asked with pictures (recollect ask): here is the mean of its bases."
    : K > MOST_SLIDERS ? `The ${MOST_SLIDERS} bases that weigh most here, of ${K}.` : `${count(K, "base")}, each with its coefficient.`;
  const range = 2 * Math.max(...recalls.map((each) => each.reduce((most, v) => Math.max(most, Math.abs(v)), 0))) || 1;
  $("sliders").replaceChildren(...moved.map((k) => slider(k, range)));
}

const shown = (value) => (Math.round(100 * value) / 100 + 0).toFixed(2); // never -0.00

function slider(k, range) {
  const size = shape.slice(1).reduce((a, b) => a * b, 1);
  const canvas = el("canvas", { className: "pixels" });
  paint(canvas, stretched(pictures.slice(k * size, (k + 1) * size)), shape.slice(1));
  const output = el("output", {}, shown(coefficients[k]));
  const input = el("input", { type: "range", min: -range, max: range, step: "any", aria: { label: `coefficient of base ${k + 1}` } });
  input.value = coefficients[k];
  input.setAttribute("aria-valuetext", output.value);
  input.addEventListener("input", () => {
    coefficients[k] = Number(input.value);
    output.value = shown(coefficients[k]);
    input.setAttribute("aria-valuetext", output.value);
    redraw();
  });
  return el("div", { className: "slider", dataset: { base: k } }, canvas, input, output);
}

function redraw() {
  draw($("picture"), coefficients);
  const moved = coefficients.some((value, k) => value !== recalls[current][k]);
  const name = memory.classes[$("class").value];
  const what = memory.classes.length ? `“${name}”, recall ${current + 1} of ${recalls.length}` : "the mean of its bases";
  $("picture-caption").textContent = moved ? `${what}, changed by hand` : what;
  $("picture").setAttribute("aria-label", $("picture-caption").textContent);
  $("reset").disabled = !moved;
}

async function save() {
  const options = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ coefficients: [...coefficients] }) };
  try {
    const blob = await (await ask(`/api/memories/${memory.id}/recall`, options)).blob();
    const link = el("a", { href: URL.createObjectURL(blob), download: "recalled.png" });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  } catch (error) {
    problem($("look-problem"), error);
  }
}

$("class").addEventListener("change", () => choose(Number($("class").value)));
$("reset").addEventListener("click", () => show(current));
$("save-picture").addEventListener("click", save);
