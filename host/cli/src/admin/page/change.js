// What the operator changes: reload and rollback, each confirmed, with its answer in plain words.

import { bytes, change, element, short, write } from './host.js';

const of = (id) => document.getElementById(id);

/** A slot's builder in words. */
const whose = (backend, tenant) => (tenant ? `${backend}, tenant ${tenant}` : `${backend}, everybody's`);
const builder = ({ name, version }) => `${name} (${short(version)})`;

/** Resolves to whether it was confirmed. */
function confirmed(title, text, yes) {
  write(of('confirm-title'), title);
  write(of('confirm-text'), text);
  write(of('confirm-yes'), yes);
  const dialog = of('confirm');
  dialog.returnValue = 'no';
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener('close', () => resolve(dialog.returnValue === 'yes'), { once: true });
  });
}

function say(where, text, kind = '') {
  where.className = `answer ${kind}`.trim();
  where.hidden = text === '';
  write(where, text);
}

export async function rollback(backend, tenant) {
  const where = of('rollback-answer');
  const text = 'A candidate that is being tried is withdrawn. Without one, the version before the one in service takes over at the next step.';
  say(where, '');
  if (!(await confirmed(`Roll back ${whose(backend, tenant)}?`, text, 'Roll back'))) return;
  say(where, 'Rolling back…');
  try {
    const answer = await change('/api/rollback', tenant ? { backend, tenant } : { backend });
    say(where, answer.withdrawn
      ? `The candidate ${builder(answer.withdrawn)} is withdrawn; what serves goes on.`
      : `${builder(answer)} takes over at the next step, from ${answer.origin}.`, 'good');
  } catch (error) {
    say(where, `Not rolled back: ${error.message}`, 'bad');
  }
}

/** What was submitted, until it serves or will not. */
let submitted;

export function setUp() {
  const form = of('reload');
  const numbers = () => {
    const stages = form.elements.stages.value.split(' ');
    for (const field of document.querySelectorAll('[data-stage]')) {
      field.hidden = !stages.includes(field.dataset.stage);
      for (const input of field.querySelectorAll('input')) input.disabled = field.hidden;
    }
    of('numbers').hidden = !/shadow|canary/.test(form.elements.stages.value);
  };
  form.addEventListener('change', numbers);
  numbers();
  form.addEventListener('submit', (event) => {
    event.preventDefault();
    reload(form);
  });
}

function parameters(form, file, signature) {
  const [backend, tenant] = JSON.parse(of('slot').value);
  const given = new URLSearchParams({ backend });
  if (tenant) given.set('tenant', tenant);
  if (file) given.set('origin', file.name);
  if (signature) given.set('signature_bytes', signature.size);
  for (const option of of('options').value.split('\n')) {
    if (option.trim()) given.append('option', option.trim());
  }
  const stages = form.elements.stages.value;
  if (stages === 'none') given.set('immediate', 'true');
  if (stages.includes('shadow')) given.set('shadow_steps', of('shadow_steps').value);
  if (stages.includes('canary')) {
    given.set('canary_per_mille', Math.round(of('canary_share').value * 10));
    given.set('canary_steps', of('canary_steps').value);
  }
  if (/shadow|canary/.test(stages)) {
    for (const gate of document.querySelectorAll('[data-gate]')) {
      if (gate.value) given.set(gate.id, gate.value);
    }
  }
  return given;
}

async function reload(form) {
  const where = of('reload-answer');
  const [file] = of('component').files;
  const [signature] = of('signature').files;
  submitted = undefined;
  say(where, '');
  if (!file && !of('options').value.trim()) {
    say(where, 'Choose a component, or give options for the one in service.', 'bad');
    of('component').focus();
    return;
  }
  const [backend, tenant] = JSON.parse(of('slot').value);
  const what = file ? `${file.name}, ${bytes(file.size)},` : 'The component in service, with other options,';
  const how = form.querySelector('[name=stages]:checked').parentElement.textContent.trim();
  if (!(await confirmed(`Reload ${whose(backend, tenant)}?`, `${what} goes into service ${how}. Requests go on meanwhile.`, 'Reload'))) return;
  const button = form.querySelector('button.main');
  button.disabled = true;
  say(where, 'The host checks it…');
  try {
    const given = parameters(form, file, signature);
    const answer = await change('/api/reload', given, new Blob([file, signature].filter(Boolean)));
    submitted = { backend, tenant, version: answer.version, staged: answer.stage !== 'checked', text: builder(answer) };
    const next = submitted.staged ? `is in ${answer.stage}` : 'takes over at the next step';
    say(where, `${submitted.text} is good and ${next}.`, 'good');
  } catch (error) {
    say(where, `Not taken: ${error.message}`, 'bad');
  } finally {
    button.disabled = false;
  }
}

/** The slots that a reload can be for, and what became of the last one. */
export function look(builders) {
  const select = of('slot');
  const slots = new Map(builders.map(({ backend, tenant }) => [JSON.stringify([backend, tenant]), whose(backend, tenant)]));
  const known = [...select.options].map((option) => option.value);
  if (known.join() !== [...slots.keys()].join()) {
    const chosen = select.value;
    select.replaceChildren(...[...slots].map(([value, text]) => {
      const option = element('option', text);
      option.value = value;
      return option;
    }));
    if (slots.has(chosen)) select.value = chosen;
  }
  const slot = submitted && builders.find(({ backend, tenant }) => backend === submitted.backend && tenant === submitted.tenant);
  if (!slot) return;
  const { candidate } = slot;
  const tried = submitted.staged && candidate?.version.version === submitted.version;
  if (tried && candidate.stage === 'withdrawn') {
    say(of('reload-answer'), `${submitted.text} is withdrawn: ${candidate.withdrawn}. What served goes on.`, 'bad');
  } else if (tried && candidate.stage !== 'active') {
    return say(of('reload-answer'), `${submitted.text} is good and is in ${candidate.stage}.`, 'good');
  } else if (slot.active?.version === submitted.version) {
    say(of('reload-answer'), `${submitted.text} serves.`, 'good');
  } else {
    return;
  }
  submitted = undefined;
}
