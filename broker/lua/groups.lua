-- groups.lua: records of groups that are not closed, for people: one, or the oldest of a state.
-- KEYS  1 policy; reads group:<id> and the indexes
-- ARGV  1 "id" | generating | ready | leased | trained (with filtered)  2 group id, or the most to list
-- returns for each {id, then its record as name, value...}
local ids = {ARGV[2]}
if ARGV[1] ~= 'id' then ids = redis.call('ZRANGE', k(ARGV[1]), 0, tonumber(ARGV[2]) - 1) end
local out = {}
for _, id in ipairs(ids) do
  local record = redis.call('HGETALL', k('group:' .. id))
  if #record > 0 then out[#out + 1] = {id, unpack(record)} end
end
return out
