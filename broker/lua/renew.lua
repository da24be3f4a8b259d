-- renew.lua: a worker keeps the groups that it still holds.
-- KEYS  1 prefix; touches group:<id>, generating
-- ARGV  1 worker  then group ids
-- returns the ids that are still held; the worker abandons the others
local held, ids, deadline = {}, {}, int(now + n('lease_ms'))
for i = 2, #ARGV do ids[i - 1] = ARGV[i] end
for _, id in ipairs(load(ids)) do
  local rec = group(id)
  if rec.state == 'generating' and rec.worker == ARGV[1] then
    index('generating', id, deadline)
    held[#held + 1] = id
  end
end
return held
