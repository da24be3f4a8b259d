-- name_version.lua: a version that is not a step (a restored trainer's weights), above every version known anywhere.
-- KEYS  1 prefix; touches policy; reads engines
-- ARGV  1 epoch
-- returns {"named", version} | {"fenced", holder}
local highest = math.max(n('highest'), n('version'), n('published'))
for _, raw in ipairs(redis.call('HVALS', k('engines'))) do highest = math.max(highest, cjson.decode(raw).version) end
set({highest = int(highest + 1), version = int(highest + 1), straggler_since = false, stepped = false})
return {'named', int(highest + 1)}
