-- return_leased.lua: the trainer aborts a step: its batch goes back into the queue.
-- KEYS  1 prefix; touches ledger, group:<id>, leased, ready, waiting, ready_hist
-- ARGV  1 epoch
-- returns {"returned", groups} | {"fenced", holder}
local ids = redis.call('ZRANGE', k('leased'), 0, -1)
for _, id in ipairs(load(ids)) do
  local rec = group(id)
  leave(id, rec)
  enter(id, rec, 'ready')
end
set({pull_nonce = false})
count('groups_returned', #ids)
return {'returned', #ids}
