-- groups.lua: records of groups that are not closed, for people: one, or the oldest of a state.
-- KEYS  1 prefix; reads group:<id> and the indexes
-- ARGV  1 "id" | generating | ready | leased | trained (with filtered)  2 group id, or the most to list
-- returns for each {id, its record as JSON}
local ids = {ARGV[2]}
if ARGV[1] ~= 'id' then ids = redis.call('ZRANGE', k(ARGV[1]), 0, tonumber(ARGV[2]) - 1) end
local out = {}
for _, id in ipairs(load(ids)) do
  if group(id).state then out[#out + 1] = {id, cjson.encode(group(id))} end
end
return out
