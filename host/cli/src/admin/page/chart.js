// The step timeline: one stacked bar for each of the last steps, oldest at the left.
// Must never know: where steps come from.

import { count, element, time, write } from './host.js';

const PARTS = ['schedule', 'batch', 'build', 'verify', 'prepare', 'submit', 'wait', 'model', 'sample', 'output'];
/** Room for the scale at the left, and for marks below the bars. */
const LEFT = 62, BELOW = 16, ABOVE = 8;
/** Width of a bar with its gap, in pixels. */
const BAR = 6;

export class Chart {
  constructor(canvas, readout, legend, summary) {
    Object.assign(this, { canvas, readout, legend, summary });
    this.steps = [];
    this.latest = [];
    this.hidden = new Set();
    this.buttons = new Map();
    canvas.addEventListener('pointermove', (event) => this.choose(this.at(event.offsetX)));
    canvas.addEventListener('pointerleave', () => this.choose(undefined));
    canvas.addEventListener('keydown', (event) => this.key(event));
    canvas.addEventListener('blur', () => this.choose(undefined));
    new ResizeObserver(() => this.draw()).observe(canvas);
    matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => this.draw());
  }

  /** Shows these, once no step is chosen: a picture that is being read holds still. */
  show(steps) {
    this.latest = steps;
    if (this.chosen !== undefined) return;
    this.steps = steps;
    this.keys();
    this.draw();
  }

  /** The steps that fit. */
  seen() {
    return this.steps.slice(-Math.max(1, Math.floor((this.canvas.clientWidth - LEFT) / BAR)));
  }

  at(x) {
    const seen = this.seen();
    const first = this.canvas.clientWidth - seen.length * BAR;
    return seen[Math.floor((x - first) / BAR)]?.step;
  }

  key(event) {
    const seen = this.seen();
    const now = seen.findIndex(({ step }) => step === this.chosen);
    const next = { ArrowLeft: now < 0 ? seen.length - 1 : now - 1, ArrowRight: now + 1, Home: 0, End: seen.length - 1 }[event.key];
    if (event.key === 'Escape') this.choose(undefined);
    if (next === undefined) return;
    event.preventDefault();
    this.choose(seen[Math.min(Math.max(next, 0), seen.length - 1)]?.step);
  }

  choose(step) {
    this.chosen = step;
    if (step === undefined) this.show(this.latest);
    else this.draw();
  }

  shown(step) {
    return PARTS.filter((part) => !this.hidden.has(part)).reduce((sum, part) => sum + step.ns[part], 0);
  }

  /** The legend: parts that take time, each with its median. */
  keys() {
    if (this.legend.childElementCount === 0) {
      for (const part of PARTS) {
        const button = element('button');
        button.type = 'button';
        button.setAttribute('aria-pressed', 'true');
        const swatch = element('i');
        swatch.style.background = `var(--${part})`;
        button.append(swatch, element('span'));
        button.addEventListener('click', () => {
          const hide = !this.hidden.delete(part);
          if (hide) this.hidden.add(part);
          button.setAttribute('aria-pressed', String(!hide));
          this.draw();
        });
        this.buttons.set(part, button);
        this.legend.append(button);
      }
      this.legend.append(element('span', '▲ the plain builder served', 'key', 'warn'), element('span', '✕ failed', 'key', 'bad'));
    }
    const seen = this.seen();
    for (const [part, button] of this.buttons) {
      const all = seen.map((step) => step.ns[part]).sort((a, b) => a - b);
      button.hidden = !this.hidden.has(part) && !all.at(-1);
      write(button.lastChild, `${part} ${time(all[all.length >> 1] ?? 0)}`);
    }
  }

  draw() {
    const { canvas } = this;
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    const scale = window.devicePixelRatio;
    const [real, tall] = [Math.round(width * scale), Math.round(height * scale)];
    if (canvas.width !== real || canvas.height !== tall) Object.assign(canvas, { width: real, height: tall });
    const style = getComputedStyle(canvas);
    const colour = (name) => style.getPropertyValue(`--${name}`);
    const pen = canvas.getContext('2d');
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = `11px ${style.fontFamily}`;

    const seen = this.seen();
    const totals = seen.map((step) => this.shown(step)).sort((a, b) => a - b);
    const quantile = (q) => totals[Math.min(totals.length - 1, Math.floor(totals.length * q))] ?? 0;
    // One step that took very long does not flatten the others: it is cut off, and marked.
    const top = nice(Math.max(quantile(0.9) * 1.4, 1000));
    const floor = height - BELOW;
    const tallest = floor - ABOVE;
    pen.textAlign = 'right';
    pen.textBaseline = 'middle';
    for (let line = 0; line <= 4; line += 1) {
      const y = Math.round(floor - (tallest * line) / 4) + 0.5;
      pen.fillStyle = colour('line');
      pen.fillRect(LEFT, y, width - LEFT, line === 0 ? 1.5 : 0.75);
      pen.fillStyle = colour('dim');
      pen.fillText(line === 0 ? '0' : time((top * line) / 4).replace(/(\.\d*?)0+ /, '$1 ').replace('. ', ' '), LEFT - 8, y);
    }
    const colours = Object.fromEntries(PARTS.map((part) => [part, colour(part)]));
    const first = width - seen.length * BAR;
    pen.textAlign = 'center';
    seen.forEach((step, index) => {
      const x = first + index * BAR;
      if (step.step === this.chosen) {
        pen.fillStyle = colour('line');
        pen.fillRect(x - 1, 0, BAR, height);
      }
      let y = floor;
      for (const part of PARTS) {
        if (this.hidden.has(part) || y <= ABOVE) continue;
        const length = Math.min((step.ns[part] / top) * tallest, y - ABOVE);
        pen.fillStyle = colours[part];
        pen.fillRect(x, y - length, BAR - 1.5, length);
        y -= length;
      }
      if (this.shown(step) > top) {
        pen.fillStyle = colour('text');
        pen.fillRect(x, ABOVE - 4, BAR - 1.5, 2);
      }
      if (step.failed || step.fell_back) {
        pen.fillStyle = colour(step.failed ? 'bad' : 'warn');
        pen.fillText(step.failed ? '✕' : '▲', x + BAR / 2 - 1, floor + 9);
      }
    });
    write(this.summary, seen.length === 0 ? 'no steps so far'
      : `${this.chosen === undefined ? 'the last' : 'held still while a step is chosen;'} ${seen.length}: median ${time(quantile(0.5))}, p99 ${time(quantile(0.99))}`);
    this.read(seen);
  }

  read(seen) {
    const index = seen.findIndex(({ step }) => step === this.chosen);
    const text = index < 0 ? 'Point at a step to read it.' : describe(seen[index]);
    write(this.readout, text);
    const said = { valuemax: Math.max(1, seen.length), valuenow: index < 0 ? Math.max(1, seen.length) : index + 1, valuetext: text };
    for (const [name, value] of Object.entries(said)) this.canvas.setAttribute(`aria-${name}`, value);
  }
}

function describe(step) {
  const of = (times, names) => names.filter((name) => times[name] > 0).map((name) => `${name} ${time(times[name])}`).join(', ');
  const device = of(step.device_ns, Object.keys(step.device_ns));
  const total = PARTS.reduce((sum, part) => sum + step.ns[part], 0);
  return [
    `Step ${count(step.step)}: ${time(total)}, ${plural(step.requests, 'request')}, ${plural(step.tokens, 'token')}`,
    of(step.ns, PARTS),
    ...(device ? [`on the device: ${device}`] : []),
    ...(step.fell_back ? ['the plain builder served after a fault'] : []),
    ...(step.failed ? ['requests failed'] : []),
  ].join(' · ');
}

const plural = (number, what) => `${count(number)} ${what}${number === 1 ? '' : 's'}`;

/** The next number above that is easy to read in quarters. */
function nice(ns) {
  const size = 10 ** Math.floor(Math.log10(ns));
  return size * [1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10].find((factor) => ns <= size * factor);
}
