// Chats and completions from several users at once; every one must be answered well.
// k6 run --env BATON_URL=http://127.0.0.1:8000 k6.js

import { check } from 'k6';
import http from 'k6/http';

export const options = {
  vus: 6,
  iterations: 30,
  thresholds: {
    checks: ['rate==1'],
    http_req_failed: ['rate==0'],
    iterations: ['count==30'],
  },
};

const url = __ENV.BATON_URL;
const headers = { 'Content-Type': 'application/json' };

export default function () {
  const models = http.get(`${url}/v1/models`);
  check(models, { 'a model is listed': (answer) => answer.json('data.0.id') !== undefined });
  const model = models.json('data.0.id');

  const chat = http.post(
    `${url}/v1/chat/completions`,
    JSON.stringify({
      model,
      messages: [{ role: 'user', content: `Say something about the number ${__ITER}.` }],
      max_tokens: 8,
    }),
    { headers },
  );
  check(chat, {
    'the chat has an answer': (answer) =>
      answer.status === 200 && answer.json('choices.0.message.role') === 'assistant',
    'its tokens are counted': (answer) => answer.json('usage.completion_tokens') <= 8,
  });

  const stream = http.post(
    `${url}/v1/completions`,
    JSON.stringify({ model, prompt: `${__VU} and ${__ITER}`, max_tokens: 6, ignore_eos: true, stream: true }),
    { headers },
  );
  check(stream, {
    'the stream is whole': (answer) =>
      answer.status === 200 &&
      answer.body.trimEnd().endsWith('data: [DONE]') &&
      answer.body.includes('"finish_reason":"length"'),
  });
}
