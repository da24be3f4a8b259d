-- attach.lua: a trainer takes over from a checkpoint, under a new epoch. What the checkpoint trained becomes durable, what
-- was trained after it or leased returns to the queue, and the prompt cursor of the checkpoint is reconciled with ours.
-- KEYS  1 prefix; touches every key of the run but engines, versions, workers
-- ARGV  1 checkpoint step  2 its version  3 number of consumed ids  4 cursor: next index, or -1 for none
--       then the consumed ids, then the cursor's open prompts
-- returns {epoch, highest version, step, groups returned}
local step, consumed = tonumber(ARGV[1]), tonumber(ARGV[3])
-- Epochs grow with the server's clock, so that a stale trainer stays fenced after Redis lost data.
set({epoch = int(math.max(n('epoch') + 1, now))})
local highest = math.max(n('highest'), n('version'), n('published'), tonumber(ARGV[2]))
set({highest = highest, version = highest})
for i = 5, 4 + consumed do
  local rec = group(ARGV[i])
  if rec.state then make_durable(ARGV[i], rec) end
end
flush()
for _, id in ipairs(load(redis.call('ZRANGEBYSCORE', k('trained'), '-inf', step))) do make_durable(id, group(id)) end
flush()
for _, past in ipairs(redis.call('HKEYS', k('step_lags'))) do
  if tonumber(past) > step then
    for lag, entry in pairs(cjson.decode(redis.call('HGET', k('step_lags'), past))) do
      histogram('lag_hist', lag, -entry[1], -entry[2])
    end
  end
end
redis.call('DEL', k('step_lags'))
local returned, undone = 0, redis.call('ZRANGE', k('trained'), 0, -1)
for _, id in ipairs(redis.call('ZRANGE', k('leased'), 0, -1)) do undone[#undone + 1] = id end
for _, id in ipairs(load(undone)) do
  local rec = group(id)
  if rec.state == 'trained' or rec.state == 'filtered' then
    waited(rec, -1)
    if rec.state == 'trained' then
      attribute('trained', rec, rec.trained_at - rec.oldest, -1)
    end
    count('groups_rolled_back')
  end
  index('open', rec.prompt, rec.prompt)
  if field(rec, 'bytes') == 0 then
    close(id, rec, 'failed', 'rolled back, payload not retained', 'again')
  elseif highest - rec.oldest > n('max_lag') then
    close(id, rec, 'stale', 'stale after a rollback', 'again')
    count('stale_at_attach')
  else
    leave(id, rec)
    enter(id, rec, 'ready')
    returned = returned + 1
  end
end
-- Without a checkpoint no prompt was trained in the history that goes on: the cursor is known, it is empty.
local next_index = tonumber(ARGV[4])
if next_index < 0 and step == 0 then next_index = 0 end
if next_index >= 0 then
  flush()
  local function reopen(prompt)
    if not redis.call('ZSCORE', k('open'), prompt) and redis.call('HEXISTS', k('dead'), prompt) == 0 then
      reissue(prompt, 0)
      count('prompts_restored')
    end
  end
  for i = 5 + consumed, #ARGV do reopen(ARGV[i]) end
  local known = tonumber(redis.call('HGET', k('cursor'), 'next_prompt'))
  for prompt = next_index, known - 1 do reopen(int(prompt)) end
  redis.call('HSET', k('cursor'), 'next_prompt', int(math.max(next_index, known)))
end
set({step = step, durable_step = step, trainer_deadline = int(now + n('trainer_lease_ms')), straggler_since = false,
  pull_nonce = false, stepped = false})
if policy.status ~= 'draining' then set({status = 'running'}) end
count('attachments')
event('attach', 'epoch ' .. policy.epoch .. ' at step ' .. step .. ', ' .. returned .. ' groups returned')
return {policy.epoch, highest, step, returned}
