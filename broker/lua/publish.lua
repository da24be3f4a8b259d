-- publish.lua: the weights of a version are complete in the store; engines may load them.
-- KEYS  1 prefix; touches policy, versions, counters, events; tells the channel changes
-- ARGV  1 epoch  2 version  3 record (JSON without published_ms)
-- returns {"published", ms} | {"version", newest version named} | {"fenced", holder}
local version = tonumber(ARGV[2])
if version > n('highest') or version < n('published') then return {'version', policy.highest} end
if version ~= n('published') then count('versions_published') end
local record = cjson.decode(ARGV[3])
record.published_ms = now
redis.call('HSET', k('versions'), ARGV[2], cjson.encode(record))
set({published = ARGV[2]})
event('publish', 'version ' .. ARGV[2])
redis.call('PUBLISH', k('changes'), 'version ' .. ARGV[2])
return {'published', int(now)}
