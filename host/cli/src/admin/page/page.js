// Asks the host once a second and shows what it answers.

import { Chart } from './chart.js';
import { look, rollback, setUp } from './change.js';
import { ask, count, element, short, time, write } from './host.js';

const INTERVAL = 1000;
/** Later than this the host is gone. */
const PATIENCE = 5000;
const STEPS = 256;

const of = (id) => document.getElementById(id);
const chart = new Chart(of('steps'), of('steps-readout'), of('legend'), of('steps-summary'));

/** The answer before, with the moment that it came: rates are between two. */
let before;
/** When the host answered last. */
let answered;

function figures({ engine }) {
  const now = { at: performance.now(), engine };
  const rate = (name) => {
    const more = engine[name] - (before?.engine[name] ?? Infinity);
    return more >= 0 ? Math.round(more / ((now.at - before.at) / 1000)) : undefined;
  };
  const said = (value) => (value === undefined ? '–' : count(value));
  const shown = {
    Running: count(engine.running),
    Waiting: count(engine.waiting),
    'Tokens/s': said(rate('tokens_sampled')),
    'Steps/s': said(rate('steps')),
    'KV cache': `${(engine.kv_cache_usage * 100).toFixed(1)} %`,
    Steps: count(engine.steps),
    'Fallback steps': count(engine.fallback_steps),
    'Failed steps': count(engine.failed_steps),
  };
  const list = of('figures');
  if (list.childElementCount === 0) {
    for (const name of Object.keys(shown)) {
      const group = element('div');
      group.append(element('dt', name), element('dd'));
      list.append(group);
    }
  }
  Object.values(shown).forEach((value, index) => write(list.children[index].lastChild, value));
  list.children[7].lastChild.classList.toggle('bad', engine.failed_steps > 0);
  list.children[6].lastChild.classList.toggle('warn', engine.fallback_steps > 0);
  before = now;
}

const rows = new Map();
const STATES = { active: 'good', plain: '', recovering: 'warn', backing_off: 'warn', quarantined: 'bad', closed: 'bad' };

function newRow(slot) {
  const row = of('row').content.firstElementChild.cloneNode(true);
  const button = row.querySelector('button');
  button.setAttribute('aria-label', `Roll back ${slot.group}`);
  button.addEventListener('click', () => rollback(slot.backend, slot.tenant));
  of('builders').tBodies[0].append(row);
  rows.set(slot.group, row);
  return row;
}

function builders(slots) {
  for (const [group, row] of rows) {
    if (!slots.some((slot) => slot.group === group)) {
      row.remove();
      rows.delete(group);
    }
  }
  for (const slot of slots) {
    const row = rows.get(slot.group) ?? newRow(slot);
    const cell = (name) => row.querySelector(`.${name}`);
    const { active } = slot;
    const faults = Object.values(slot.all_faults).reduce((sum, number) => sum + number, 0);
    const options = (active?.options ?? []).map(([key, value]) => `${key}=${value}`).join(', ');
    const texts = {
      slot: slot.group,
      where: `${slot.backend}, ${count(slot.layers)} layers`,
      tenant: slot.tenant ?? "everybody's",
      state: slot.state.replace('_', ' '),
      name: active?.name ?? 'plain builder',
      version: short(active?.version),
      origin: active ? `from ${active.origin}${options && `, ${options}`}` : '',
      steps: count(slot.steps),
      plain: count(slot.plain_steps),
      p50: time(slot.build_p50_ns),
      p99: time(slot.build_p99_ns),
      faults: count(faults),
    };
    for (const [name, text] of Object.entries(texts)) write(cell(name), text);
    cell('version').title = active?.version ?? '';
    cell('origin').title = texts.origin;
    cell('faults').classList.toggle('bad', faults > 0);
    cell('state').className = `state pill ${STATES[slot.state] ?? ''}`.trim();
    const tried = ['shadow', 'canary'].includes(slot.candidate?.stage);
    row.querySelector('button').disabled = !tried && !slot.previous;
  }
}

/** A bar with what it counts. */
function bar(what, value, most) {
  const label = element('label');
  label.append(element('span', what), element('span', `${count(Math.min(value, most))} of ${count(most)} steps`));
  const progress = element('progress');
  Object.assign(progress, { value: Math.min(value, most), max: most });
  progress.setAttribute('aria-label', what);
  return [label, progress];
}

function beside({ candidate_p50_ns: own, active_p50_ns: active }) {
  if (own === null) return [];
  return [`build p50 ${time(own)}${active === null ? '' : ` beside ${time(active)}`}`];
}

function candidateOf(slot) {
  const { stage, version, plan, shadow, canary, faults, withdrawn } = slot.candidate;
  const box = element('div', '', 'candidate');
  const title = element('p');
  const kind = { withdrawn: 'bad', active: 'good', shadow: 'warn', canary: 'warn' }[stage];
  title.append(element('span', stage, 'pill', ...(kind ? [kind] : [])), ` ${version.name} `, element('span', short(version.version), 'mono'), ` for ${slot.group}`);
  box.append(title, element('p', `from ${version.origin}`, 'dim'));
  if (withdrawn) box.append(element('p', withdrawn, 'bad'));
  if (plan.shadow_steps > 0) {
    const seen = [`${count(shadow.observed)} compared`, `${count(shadow.differences)} differ`, `faults: ${count(faults)}`, ...beside(shadow)];
    if (shadow.first_difference) seen.push(shadow.first_difference);
    box.append(...bar('Shadow', shadow.steps, plan.shadow_steps), element('p', seen.join(', '), 'dim'));
  }
  if (plan.canary) box.append(...bar('Canary', canary.steps, plan.canary.steps), element('p', [`faults: ${count(faults)}`, ...beside(canary)].join(', '), 'dim'));
  return box;
}

/** What was last made of each list: it is made again only where it changes. */
const made = new Map();

function list(where, data, make) {
  const text = JSON.stringify(data);
  if (made.get(where) === text) return;
  made.set(where, text);
  of(where).replaceChildren(...make());
}

function candidates(slots) {
  const tried = slots.filter((slot) => slot.candidate);
  list('candidates', tried.map((slot) => [slot.group, slot.candidate]), () =>
    tried.length ? tried.map(candidateOf) : [element('p', 'No version is being tried.', 'dim')]);
}

function faults(slots) {
  const records = slots.flatMap((slot) => slot.fault_records.map((record) => ({ ...record, group: slot.group }))).reverse();
  list('faults', records, () => {
    if (records.length === 0) return [element('li', 'None so far.', 'none')];
    return records.map((record) => {
      const item = element('li');
      item.append(element('b', `${count(record.count)} × ${record.kind}`), ` in ${record.group}, version `,
        element('span', short(record.version), 'mono'), element('p', record.message, 'dim'));
      return item;
    });
  });
}

function status(error) {
  const gone = of('gone');
  of('main').classList.toggle('gone', Boolean(error));
  const pill = of('status');
  pill.className = `pill ${error ? 'bad' : 'good'}`;
  write(pill, error ? 'no answer' : 'live');
  gone.hidden = !error;
  if (!error) return;
  const since = answered ? ` What is shown is what it said last, at ${answered.toLocaleTimeString()}.` : '';
  write(gone, `${error.gone ? 'The host does not answer: it has ended, or cannot be reached.' : `The host answers with an error: ${error.message}.`}${since} The page keeps trying.`);
}

async function refresh() {
  const options = () => ({ signal: AbortSignal.timeout(PATIENCE) });
  try {
    const [table, steps] = await Promise.all([ask('/api/builders', options()), ask(`/api/steps?last=${STEPS}`, options())]);
    answered = new Date();
    write(of('model'), table.model_name ?? '');
    figures(table);
    chart.show(steps.steps);
    builders(table.builders);
    candidates(table.builders);
    faults(table.builders);
    look(table.builders);
    status();
  } catch (error) {
    before = undefined;
    status(error);
  }
  setTimeout(refresh, document.hidden ? 5 * INTERVAL : INTERVAL);
}

setUp();
refresh();
