-- common.lua: shared text in front of every transition (the loader concatenates it). It reads the policy once and names
-- the moves of the ledger; a transition is then a few lines.
-- KEYS  1 the prefix of all keys of the run, with its hash tag. Redis asks for leave to write the keys that a call names,
--       so it names this one, which is no key, and what a role may write is told by what its scripts touch (access.py):
--   policy (hash)            the run's settings, step, version, epoch and status: written by trainer and operators alone
--   cursor (hash)            next_prompt, last_id: of the prompt and the group that come next
--   evaluator (hash)         deadline: until when one counts as alive, ms; asked: a step, if an operator asked for one
--   ledger (hash)            g_<state>, t_<state>: groups and tokens; g_durable, t_durable; bytes; ready_ms
--   group:<id> (string)      record of a group that is not closed, msgpack; payload:<id> (string) its bytes. A record
--                            holds state, prompt, attempt, worker, engine, version, issued; from its submission on also
--                            oldest, tokens, total, samples, bytes, sum, submitted, task and, for a file, blob; then
--                            pulled, step, wait, trained_at
--   generating (zset)        id by lease deadline, ms        admitted_hist (hash)  of these, how many by version
--   ready (zset)             id by oldest version            waiting (zset)   id by submission time, ms
--   waiting:<dimension>:<name> (zsets)  the same by task, engine and worker
--   leased (zset)            id by pull time, ms             trained (zset)   id by step; retained: those with a payload
--   open, reissue (zsets)    prompts by index: not trained or given up; to issue before new ones
--   tries (hash)             prompt -> attempt that comes next, of the prompts in reissue
--   dead (hash), dead_order (zset)  dead letters by prompt; events, metrics, evaluations (lists)  newest first, capped
--   ready_hist, lag_hist (hashes)   g:<version or lag>, t:<...>;  step_lags (hash)  step -> lags of a step not yet durable
--   by_hist (hash)           the same by task, engine and worker: g:<waiting|trained>:<dimension>:<version|lag>:<name>;
--                            sums of submission times and of times in queue, ms: s:<waiting|trained>:<dimension>:0:<name>;
--                            wait_hist by name: w:trained:<dimension>:<i>:<name>
--   wait_hist (hash)         time in queue of the trained: g:<i>, i = floor(8 log2(1 + seconds)); filtered ones, too
--   freed (list)             files of a payload folder whose groups are closed, to be deleted by a client
--   pass_rates (hash)        prompt -> passes and samples, faded
--   engines, versions, workers (hashes of JSON), workers_seen (zset), counters (hash)
local PREFIX = KEYS[1]
local function k(name) return PREFIX .. name end
local POLICY = k('policy')
-- Numbers above 1e14 keep all digits; a negative zero, which Redis refuses, becomes 0, a fraction is cut off. A batch
-- writes the same few numbers again and again.
local digits = {}
local function int(x)
  local text = digits[x]
  if not text then
    text = string.format('%d', x)
    digits[x] = text
  end
  return text
end
local function hash(key)
  local list, out = redis.call('HGETALL', key), {}
  for i = 1, #list, 2 do out[list[i]] = list[i + 1] end
  return out
end
-- Settings are read when they are asked for: a transition needs a few of them.
local policy = setmetatable({}, {__index = function(known, name)
  local value = redis.call('HGET', POLICY, name)
  known[name] = value
  return value
end})
if not policy.schema then return {'uninitialised'} end
local function n(name) return tonumber(policy[name]) or 0 end
local TIME = redis.call('TIME')
local now_us = tonumber(TIME[1]) * 1000000 + tonumber(TIME[2]) + n('clock_shift_ms') * 1000
local now = math.floor(now_us / 1000)
local CAP, CHUNK = 1000, 1000

-- What a transition changes it notes in here. `write` writes indexes, before one is read again; `flush` writes all of it,
-- at the end. So a batch costs little more than one group, and what a second transition of the same script takes back is
-- never written.
local settings, records, changed, unlinked, indexes, sums, lines, attributed = {}, {}, {}, {}, {}, {}, {}, {}
local GROUP = k('group:')

-- Settings get values; false: none.
local function set(values)
  for name, value in pairs(values) do policy[name], settings[name] = value, value end
end
-- A command with all of a list as its last arguments, in as many calls as that takes.
local function with_all(list, command, key)
  for first = 1, #list, CHUNK do
    local last = math.min(first + CHUNK - 1, #list)
    if key then redis.call(command, key, unpack(list, first, last)) else redis.call(command, unpack(list, first, last)) end
  end
end
-- Reads the records of ids in one go, for `group`.
local function load(ids)
  for first = 1, #ids, CHUNK do
    local keys = {}
    for i = first, math.min(first + CHUNK - 1, #ids) do keys[i - first + 1] = GROUP .. ids[i] end
    for i, raw in ipairs(redis.call('MGET', unpack(keys))) do
      local id = ids[first + i - 1]
      if records[id] == nil then records[id] = raw and cmsgpack.unpack(raw) end
    end
  end
  return ids
end
-- The record of a group, as this transition has changed it; {} if there is none.
local function group(id)
  if records[id] == nil then load({id}) end
  return records[id] or {}
end
local function put(id, rec)
  records[id], changed[id] = rec, true
end
local function field(rec, name) return rec[name] or 0 end
-- A member of a sorted set gets a score, or leaves it (nil).
local function index(name, member, score)
  local of = indexes[name]
  if not of then
    of = {}
    indexes[name] = of
  end
  of[member] = score or false
end
local function add(name, at, by)
  if by == 0 then return end
  local of = sums[name]
  if not of then
    of = {}
    sums[name] = of
  end
  of[at] = (of[at] or 0) + by
end
local function write()
  for name, of in pairs(indexes) do
    local entering, leaving, e, l = {}, {}, 0, 0
    for member, score in pairs(of) do
      if score then
        entering[e + 1], entering[e + 2], e = int(score), member, e + 2
      else
        leaving[l + 1], l = member, l + 1
      end
    end
    with_all(entering, 'ZADD', k(name))
    with_all(leaving, 'ZREM', k(name))
  end
  indexes = {}
end
-- A field that comes to nothing goes, unless its hash keeps them.
local function increase(key, at, by, keeps)
  if by == 0 then return end
  if redis.call('HINCRBY', key, at, int(by)) == 0 and not keeps then redis.call('HDEL', key, at) end
end
local function flush()
  write()
  local written, gone = {}, {}
  for id in pairs(changed) do
    if records[id] then
      written[#written + 1] = GROUP .. id
      written[#written + 1] = cmsgpack.pack(records[id])
    else
      unlinked[#unlinked + 1] = GROUP .. id
    end
  end
  with_all(written, 'MSET')
  with_all(unlinked, 'UNLINK')
  written = {}
  for name, value in pairs(settings) do
    if value then
      written[#written + 1] = name
      written[#written + 1] = value
    else
      gone[#gone + 1] = name
    end
  end
  with_all(written, 'HSET', POLICY)
  with_all(gone, 'HDEL', POLICY)
  for _, of in ipairs(attributed) do
    for dimension, name in pairs({task = of.task, engine = of.engine, worker = of.worker}) do
      local what = ':' .. of.kind .. ':' .. dimension .. ':'
      local line = what .. int(of.at) .. ':' .. name
      add('by_hist', 'g' .. line, of.groups)
      add('by_hist', 't' .. line, of.tokens)
      add('by_hist', 's' .. what .. '0:' .. name, of.ms)
      for bucket, by in pairs(of.waits) do add('by_hist', 'w' .. what .. bucket .. ':' .. name, by) end
    end
  end
  for name, of in pairs(lines) do
    local key, keeps = k(name), name == 'ledger'
    local groups, tokens = keeps and 'g_' or 'g:', keeps and 't_' or 't:'
    for at, both in pairs(of) do
      increase(key, groups .. at, both[1], keeps)
      increase(key, tokens .. at, both[2], keeps)
    end
  end
  for name, of in pairs(sums) do
    local key, keeps = k(name), name == 'ledger'
    for at, by in pairs(of) do
      if name == 'counters' then
        redis.call('HINCRBYFLOAT', key, at, by)
      else
        increase(key, at, by, keeps)
      end
    end
  end
  settings, changed, unlinked, sums, lines, attributed = {}, {}, {}, {}, {}, {}
end
local function count(name, by) add('counters', name, tonumber(by or 1)) end
-- A sum as this transition has changed it.
local function total(name, at)
  return (tonumber(redis.call('HGET', k(name), at)) or 0) + (sums[name] and sums[name][at] or 0)
end
local function capped(list, text)
  local over = redis.call('LPUSH', k(list), text) - CAP
  if over > 0 then
    redis.call('LTRIM', k(list), 0, CAP - 1)
    count(list .. '_dropped', over)
  end
end
local function event(kind, text)
  capped('events', cjson.encode({time_ms = now, kind = kind, text = text}))
end
-- Groups and tokens of one line of a ledger or histogram.
local function histogram(name, at, groups, tokens)
  local of = lines[name]
  if not of then
    of = {}
    lines[name] = of
  end
  local both = of[at]
  if not both then
    of[at] = {groups, tokens}
    return
  end
  both[1], both[2] = both[1] + groups, both[2] + tokens
end
local function tally(state, groups, tokens) histogram('ledger', state, groups, tokens) end
-- by_hist: what waits (by oldest version) or was trained (by lag), by task, engine and worker; the sums of one of each.
local function by_name(kind, rec, at)
  local of, task = attributed[#attributed], rec.task or ''
  if not of or of.worker ~= rec.worker or of.engine ~= rec.engine or of.task ~= task or of.at ~= at or of.kind ~= kind then
    of = {kind = kind, at = at, task = task, engine = rec.engine, worker = rec.worker, groups = 0, tokens = 0, ms = 0,
      waits = {}, queues = {'waiting:task:' .. task, 'waiting:engine:' .. rec.engine, 'waiting:worker:' .. rec.worker}}
    attributed[#attributed + 1] = of
  end
  return of
end
local function attribute(kind, rec, at, sign)
  local of = by_name(kind, rec, at)
  of.groups, of.tokens = of.groups + sign, of.tokens + sign * field(rec, 'tokens')
  return of
end
-- The time in queue of a group that was trained or filtered, in all and by name.
local function waited(rec, by)
  local wait = field(rec, 'wait')
  local bucket = math.floor(8 * math.log(1 + wait / 1000) / math.log(2))
  add('ledger', 'wait_ms', by * wait)
  add('ledger', 'waits', by)
  add('wait_hist', 'g:' .. bucket, by)
  local of = by_name('trained', rec, rec.trained_at - rec.oldest)
  of.ms, of.waits[bucket] = of.ms + by * wait, (of.waits[bucket] or 0) + by
end
-- A group begins (1) or ends (-1) to wait, in all and by name.
local function queued(id, rec, sign)
  local since = sign > 0 and rec.submitted or nil
  index('ready', id, sign > 0 and rec.oldest or nil)
  index('waiting', id, since)
  add('ledger', 'ready_ms', sign * rec.submitted)
  histogram('ready_hist', rec.oldest, sign, sign * field(rec, 'tokens'))
  local of = attribute('waiting', rec, rec.oldest, sign)
  of.ms = of.ms + sign * rec.submitted
  for _, queue in ipairs(of.queues) do index(queue, id, since) end
end

-- A group leaves the indexes and the tally of its state.
local function leave(id, rec)
  local state, tokens = rec.state, field(rec, 'tokens')
  if state == 'generating' then
    tally(state, -1, 0)
    index('generating', id)
    add('admitted_hist', rec.version, -1)
    return
  end
  tally(state, -1, -tokens)
  if state == 'ready' then
    queued(id, rec, -1)
  elseif state == 'leased' then
    index('leased', id)
  else
    index('trained', id)
    index('retained', id)
  end
end
-- A group with a submission enters ready, leased, trained or filtered; its record is written with all its changes.
local function enter(id, rec, state)
  local tokens = field(rec, 'tokens')
  rec.state = state
  put(id, rec)
  tally(state, 1, tokens)
  if state == 'ready' then
    queued(id, rec, 1)
  elseif state == 'leased' then
    index('leased', id, now)
  else
    index('trained', id, rec.step)
    if rec.bytes > 0 then index('retained', id, rec.step) end
  end
end
local function free_payload(id, rec)
  if field(rec, 'bytes') > 0 then
    if rec.blob then
      redis.call('RPUSH', k('freed'), rec.blob)
    else
      unlinked[#unlinked + 1] = k('payload:' .. id)
    end
    add('ledger', 'bytes', -rec.bytes)
    index('retained', id)
    rec.bytes = 0
    put(id, rec)
  end
end
local function reissue(prompt, attempt)
  index('reissue', prompt, prompt)
  index('open', prompt, prompt)
  redis.call('HSET', k('tries'), prompt, attempt)
end
local function bury(id, rec, reason)
  index('open', rec.prompt)
  redis.call('HSET', k('dead'), rec.prompt, cjson.encode({group_id = id, prompt_index = tonumber(rec.prompt),
    attempt = rec.attempt, reason = reason, worker = rec.worker, time_ms = now}))
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
  put(id, false)
  if mode == 'again' then
    reissue(rec.prompt, rec.attempt)
  elseif mode == 'try' and rec.attempt < n('group_tries') then
    reissue(rec.prompt, rec.attempt + 1)
    count('prompts_reissued')
  else
    bury(id, rec, reason)
  end
end
-- A group's step is part of a durable checkpoint. It stays in the tally of trained or filtered; record and payload go.
local function make_durable(id, rec)
  if rec.state == 'trained' or rec.state == 'filtered' then
    index('trained', id)
  else
    leave(id, rec)
    tally('trained', 1, field(rec, 'tokens'))
    index('open', rec.prompt)
  end
  tally('durable', 1, field(rec, 'tokens'))
  free_payload(id, rec)
  put(id, false)
end
local function reap()
  -- A lease that ends later than one from now was given before the server's clock was set back, or as a longer one. Its
  -- worker may be gone: it becomes one from now.
  local latest = int(now + n('lease_ms'))
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', k('generating'), '(' .. latest, '+inf', 'LIMIT', 0, 100)) do
    index('generating', id, latest)
  end
  local ids = redis.call('ZRANGEBYSCORE', k('generating'), '-inf', int(now), 'LIMIT', 0, 100)
  for _, id in ipairs(load(ids)) do
    close(id, group(id), 'failed', 'lease expired', 'try')
    count('leases_expired')
  end
  if #ids > 0 then flush() end
end
local function in_flight()
  return redis.call('ZCARD', k('generating')) + redis.call('ZCARD', k('ready')) + redis.call('ZCARD', k('leased'))
end
