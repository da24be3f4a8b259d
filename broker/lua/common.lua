-- common.lua: shared text in front of every transition (the loader concatenates it). It reads the policy once and names
-- the moves of the ledger; a transition is then a few lines.
-- KEYS  1 policy (hash). Every other key of the run has the same prefix and the same hash tag:
--   ledger (hash)            g_<state>, t_<state>: groups and tokens; g_durable, t_durable; bytes; ready_ms
--   group:<id> (hash)        one record for each group that is not closed; payload:<id> (string) its bytes
--   generating (zset)        id by lease deadline, ms        admitted (zset)  id by the engine's version at admission
--   ready (zset)             id by oldest version            waiting (zset)   id by submission time, ms
--   leased (zset)            id by pull time, ms             trained (zset)   id by step; retained: those with a payload
--   open, reissue (zsets)    prompts by index: not trained or given up; to issue before new ones
--   tries (hash)             prompt -> attempt that comes next, of the prompts in reissue
--   dead (hash), dead_order (zset)  dead letters by prompt; events, metrics (lists)  newest first, capped
--   ready_hist, lag_hist (hashes)   g:<version or lag>, t:<...>;  step_lags (hash)  step -> lags of a step not yet durable
--   by_hist (hash)           the same by task, engine and worker: g:<waiting|trained>:<dimension>:<version|lag>:<name>
--   wait_hist (hash)         time in queue of the trained: g:<i>, i = floor(8 log2(1 + seconds)); filtered ones, too
--   freed (list)             files of a payload folder whose groups are closed, to be deleted by a client
--   engines, versions, workers (hashes of JSON), workers_seen (zset), counters (hash)
local P = string.sub(KEYS[1], 1, -7)
local function k(name) return P .. name end
-- Numbers above 1e14 keep all digits; a negative zero, which Redis refuses, becomes 0.
local function int(x) return x == 0 and '0' or string.format('%.0f', x) end
local function hash(key)
  local list, out = redis.call('HGETALL', key), {}
  for i = 1, #list, 2 do out[list[i]] = list[i + 1] end
  return out
end
local policy = hash(KEYS[1])
if not policy.schema then return {'uninitialised'} end
local function n(name) return tonumber(policy[name]) or 0 end
local TIME = redis.call('TIME')
local now_us = tonumber(TIME[1]) * 1000000 + tonumber(TIME[2]) + n('clock_shift_ms') * 1000
local now = math.floor(now_us / 1000)
local CAP = 1000

local function set(name, value)
  policy[name] = value
  redis.call('HSET', KEYS[1], name, value)
end
-- Sums are added up in here and written once at the end of the transition (flush): a batch costs little more than one.
local sums = {}
local function add(name, at, by)
  if by == 0 then return end
  local of = sums[name]
  if not of then
    of = {}
    sums[name] = of
  end
  of[at] = (of[at] or 0) + by
end
local function flush()
  for name, of in pairs(sums) do
    local key = k(name)
    for at, by in pairs(of) do
      if name == 'counters' then
        redis.call('HINCRBYFLOAT', key, at, by)
      elseif by ~= 0 then
        local left = redis.call('HINCRBY', key, at, int(by))
        if left == 0 and string.sub(name, -5) == '_hist' then redis.call('HDEL', key, at) end
      end
    end
  end
end
local function count(name, by) add('counters', name, tonumber(by or 1)) end
local function stored_bytes()
  return (tonumber(redis.call('HGET', k('ledger'), 'bytes')) or 0) + (sums.ledger and sums.ledger.bytes or 0)
end
local function capped(list, text)
  redis.call('LPUSH', k(list), text)
  local over = redis.call('LLEN', k(list)) - CAP
  if over > 0 then
    redis.call('LTRIM', k(list), 0, CAP - 1)
    count(list .. '_dropped', over)
  end
end
local function event(kind, text)
  capped('events', cjson.encode({time_ms = now, kind = kind, text = text}))
end
local function tally(state, groups, tokens)
  add('ledger', 'g_' .. state, groups)
  add('ledger', 't_' .. state, tokens)
end
local function histogram(name, at, groups, tokens)
  add(name, 'g:' .. at, groups)
  add(name, 't:' .. at, tokens)
end
local function group(id) return hash(k('group:' .. id)) end
local function field(rec, name) return tonumber(rec[name]) or 0 end
-- by_hist: what waits (by oldest version) or was trained (by lag), by task, engine and worker.
local function attribute(kind, rec, at, sign)
  for _, dimension in ipairs({'task', 'engine', 'worker'}) do
    local where = ':' .. kind .. ':' .. dimension .. ':' .. at .. ':' .. (rec[dimension] or '')
    add('by_hist', 'g' .. where, sign)
    add('by_hist', 't' .. where, sign * field(rec, 'tokens'))
  end
end
local function waited(rec, by)
  add('wait_hist', 'g:' .. math.floor(8 * math.log(1 + field(rec, 'wait') / 1000) / math.log(2)), by)
end

-- A group leaves the indexes and the tally of its state.
local function leave(id, rec)
  local state, tokens = rec.state, field(rec, 'tokens')
  if state == 'generating' then
    tally(state, -1, 0)
    redis.call('ZREM', k('generating'), id)
    redis.call('ZREM', k('admitted'), id)
    return
  end
  tally(state, -1, -tokens)
  if state == 'ready' then
    redis.call('ZREM', k('ready'), id)
    redis.call('ZREM', k('waiting'), id)
    add('ledger', 'ready_ms', -field(rec, 'submitted'))
    histogram('ready_hist', rec.oldest, -1, -tokens)
    attribute('waiting', rec, rec.oldest, -1)
  elseif state == 'leased' then
    redis.call('ZREM', k('leased'), id)
  else
    redis.call('ZREM', k('trained'), id)
    redis.call('ZREM', k('retained'), id)
  end
end
-- A group with a submission enters ready, leased, trained or filtered. written: its record says so already.
local function enter(id, rec, state, written)
  local tokens = field(rec, 'tokens')
  rec.state = state
  if not written then redis.call('HSET', k('group:' .. id), 'state', state) end
  tally(state, 1, tokens)
  if state == 'ready' then
    redis.call('ZADD', k('ready'), rec.oldest, id)
    redis.call('ZADD', k('waiting'), rec.submitted, id)
    add('ledger', 'ready_ms', field(rec, 'submitted'))
    histogram('ready_hist', rec.oldest, 1, tokens)
    attribute('waiting', rec, rec.oldest, 1)
  elseif state == 'leased' then
    redis.call('ZADD', k('leased'), now, id)
  else
    redis.call('ZADD', k('trained'), rec.step, id)
    if field(rec, 'bytes') > 0 then redis.call('ZADD', k('retained'), rec.step, id) end
  end
end
local function free_payload(id, rec)
  if field(rec, 'bytes') > 0 then
    if rec.blob then
      redis.call('RPUSH', k('freed'), rec.blob)
    else
      redis.call('UNLINK', k('payload:' .. id))
    end
    add('ledger', 'bytes', -field(rec, 'bytes'))
    redis.call('ZREM', k('retained'), id)
    redis.call('HSET', k('group:' .. id), 'bytes', '0')
    rec.bytes = '0'
  end
end
local function reissue(prompt, attempt)
  redis.call('ZADD', k('reissue'), prompt, prompt)
  redis.call('ZADD', k('open'), prompt, prompt)
  redis.call('HSET', k('tries'), prompt, attempt)
end
local function bury(id, rec, reason)
  redis.call('ZREM', k('open'), rec.prompt)
  redis.call('HSET', k('dead'), rec.prompt, cjson.encode({group_id = id, prompt_index = tonumber(rec.prompt),
    attempt = tonumber(rec.attempt), reason = reason, worker = rec.worker or '', time_ms = now}))
  redis.call('ZADD', k('dead_order'), now, rec.prompt)
  count('dead_letters')
  event('dead-letter', 'prompt ' .. rec.prompt .. ', attempt ' .. rec.attempt .. ': ' .. reason)
  if redis.call('ZCARD', k('dead_order')) > CAP then
    redis.call('HDEL', k('dead'), redis.call('ZPOPMIN', k('dead_order'))[1])
    count('dead_letters_dropped')
  end
end
-- A group ends as `stale` or `failed`. mode: 'try' issues its prompt again while tries are left, 'again' always and
-- without counting, 'dead' never. The record goes: an id without a record is closed.
local function close(id, rec, state, reason, mode)
  leave(id, rec)
  tally(state, 1, field(rec, 'tokens'))
  free_payload(id, rec)
  redis.call('DEL', k('group:' .. id))
  local attempt = field(rec, 'attempt')
  if mode == 'again' then
    reissue(rec.prompt, attempt)
  elseif mode == 'try' and attempt < n('group_tries') then
    reissue(rec.prompt, attempt + 1)
    count('prompts_reissued')
  else
    bury(id, rec, reason)
  end
end
-- A group's step is part of a durable checkpoint. It stays in the tally of trained or filtered; record and payload go.
local function make_durable(id, rec)
  if rec.state == 'trained' or rec.state == 'filtered' then
    redis.call('ZREM', k('trained'), id)
  else
    leave(id, rec)
    tally('trained', 1, field(rec, 'tokens'))
    redis.call('ZREM', k('open'), rec.prompt)
  end
  tally('durable', 1, field(rec, 'tokens'))
  free_payload(id, rec)
  redis.call('DEL', k('group:' .. id))
end
local function reap()
  local ids = redis.call('ZRANGEBYSCORE', k('generating'), '-inf', int(now), 'LIMIT', 0, 100)
  for _, id in ipairs(ids) do
    close(id, group(id), 'failed', 'lease expired', 'try')
    count('leases_expired')
  end
end
local function in_flight()
  return redis.call('ZCARD', k('generating')) + redis.call('ZCARD', k('ready')) + redis.call('ZCARD', k('leased'))
end
local function cursor(first)
  local out = {first, policy.next_prompt}
  for _, prompt in ipairs(redis.call('ZRANGE', k('open'), 0, -1)) do out[#out + 1] = prompt end
  return out
end
