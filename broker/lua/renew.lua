-- renew.lua: a worker keeps the groups that it still holds.
-- KEYS  1 prefix; touches group:<id>, generating
-- ARGV  1 worker  then group ids
-- returns the ids that are still held; the worker abandons the others
local held, deadline = {}, int(now + n('lease_ms'))
for _, id in ipairs(load({unpack(ARGV, 2)})) do
  local rec = group(id)
  if rec.state == 'generating' and rec.worker == ARGV[1] then
    index('generating', id, deadline)
    held[#held + 1] = id
  end
end
return held
