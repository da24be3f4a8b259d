-- admit.lua: leave for a worker to generate groups on an engine, under the bound (docs/lag-bound.md, rule A).
-- KEYS  1 prefix; touches ledger, group:<id>, generating, admitted_hist, ready, leased, retained, open, reissue,
--       tries, cursor; reads engines
-- ARGV  1 worker  2 engine id  3 groups wanted
-- returns {"tickets", {group id, prompt index, attempt, engine version, lease deadline ms}...}, as many as the bound
--         allows, at least one | {"refused", reason, detail}
local function refuse(reason, detail)
  count('refused_' .. reason)
  return {'refused', reason, detail}
end
if policy.status == 'finished' or policy.status == 'stopped' or n('durable_step') >= n('steps_total') then
  return refuse('finished', 'the run is ' .. policy.status .. ' at step ' .. policy.step .. ' of ' .. policy.steps_total)
end
if policy.paused == '1' or policy.status == 'draining' then return refuse('paused', 'admission is paused') end
if n('published') < 0 then return refuse('no-trainer', 'the trainer has not published a version yet') end
local raw = redis.call('HGET', k('engines'), ARGV[2])
local engine = raw and cjson.decode(raw)
if not engine or engine.state ~= 'serving' or engine.version < 0 then
  return refuse('engine', 'engine ' .. ARGV[2] .. ' is ' .. (engine and engine.state or 'not registered'))
end
reap()
local v, B, max_lag, e = n('version'), n('groups_per_step'), n('max_lag'), engine.version
local accepted, stored = total('counters', 'groups_accepted'), total('ledger', 'bytes')
local mean = accepted > 0 and total('counters', 'payload_bytes_total') / accepted or 0
local generating = redis.call('ZCARD', k('generating'))
local flying = in_flight()

-- Why one more group may not start now: {reason, detail}, or nil.
local function limit()
  if flying >= (max_lag + 1) * B then
    return {'bound', flying .. ' groups in flight, the bound allows ' .. (max_lag + 1) * B}
  end
  local latest = v + math.floor(flying / B)
  if latest - e > max_lag then
    return {'bound', 'a group of version ' .. e .. ' would be trained at version ' .. latest .. ', max_lag ' .. max_lag}
  end
  local left = n('steps_total') - n('step')
  if flying >= left * B then return {'bound', flying .. ' groups in flight serve the last ' .. left .. ' steps'} end
  -- Memory: what is stored, and what the groups being generated will add. Payloads kept only for a rollback go first;
  -- their prompts are issued again if it comes to that. The first batch always passes: without it nothing frees memory.
  while stored + mean * (generating + 1) > n('max_bytes') do
    local id = redis.call('ZPOPMIN', k('retained'))[1]
    if not id then
      if flying < B then break end
      return {'memory', int(stored + mean * (generating + 1)) .. ' payload bytes stored or expected, limit ' ..
        policy.max_bytes}
    end
    free_payload(id, group(id))
    stored = total('ledger', 'bytes')
    count('payloads_freed_early')
  end
end

local cursor, again = hash(k('cursor')), redis.call('ZCARD', k('reissue'))
local out, deadline = {'tickets'}, int(now + n('lease_ms'))
for _ = 1, tonumber(ARGV[3]) do
  local why = limit()
  if why then
    if #out == 1 then return refuse(why[1], why[2]) end
    break
  end
  -- Ids grow with the server's clock: none is used twice, even after Redis lost its last second or everything.
  local id = int(math.max(tonumber(cursor.last_id) + 1, now_us))
  cursor.last_id = id
  local prompt, attempt = nil, 0
  if again > 0 then
    prompt, again = redis.call('ZPOPMIN', k('reissue'))[1], again - 1
    attempt = tonumber(redis.call('HGET', k('tries'), prompt)) or 0
    redis.call('HDEL', k('tries'), prompt)
  else
    prompt = cursor.next_prompt
    cursor.next_prompt = int(tonumber(prompt) + 1)
    index('open', prompt, prompt)
  end
  put(id, {state = 'generating', prompt = prompt, attempt = attempt, worker = ARGV[1], engine = ARGV[2], version = e,
    issued = now})
  index('generating', id, deadline)
  add('admitted_hist', e, 1)
  tally('issued', 1, 0)
  tally('generating', 1, 0)
  flying, generating = flying + 1, generating + 1
  out[#out + 1] = {id, prompt, attempt, e, deadline}
end
redis.call('HSET', k('cursor'), 'last_id', cursor.last_id, 'next_prompt', cursor.next_prompt)
return out
