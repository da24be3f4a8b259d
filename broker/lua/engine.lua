-- engine.lua: registers or updates one engine, or notes that it lives; the server stamps its times.
-- KEYS  1 prefix; touches engines; tells the channel changes
-- ARGV  1 engine id  2 record (JSON)  3 state that the record must have now, '' for any  4 "register" | "update" | "heartbeat"
--       heartbeat: changes heartbeat_ms alone and, where ARGV 2 gives them, staged and staged_path; ARGV 3 is ''
--       update: keeps staged and staged_path, which are the supervisor's
-- returns {1} if written, else {0} (unknown engine, or another state)
local raw = redis.call('HGET', k('engines'), ARGV[1])
local old = raw and cjson.decode(raw)
if ARGV[4] == 'heartbeat' then
  if not old then return {0} end
  old.heartbeat_ms = now
  local told = ARGV[2] ~= '' and cjson.decode(ARGV[2])
  local news = told and told.staged ~= old.staged
  if told then old.staged, old.staged_path = told.staged, told.staged_path end
  redis.call('HSET', k('engines'), ARGV[1], cjson.encode(old))
  if news then redis.call('PUBLISH', k('changes'), 'staged ' .. ARGV[1] .. ' ' .. told.staged) end
  return {1}
end
if ARGV[4] == 'update' and not old then return {0} end
if ARGV[3] ~= '' and (not old or old.state ~= ARGV[3]) then return {0} end
local record = cjson.decode(ARGV[2])
record.since_ms = old and old.state == record.state and old.version == record.version and old.since_ms or now
record.heartbeat_ms = now
if ARGV[4] == 'update' then record.staged, record.staged_path = old.staged, old.staged_path end
redis.call('HSET', k('engines'), ARGV[1], cjson.encode(record))
if not old or old.state ~= record.state or old.version ~= record.version then
  local at = record.version >= 0 and ' at version ' .. record.version or ''
  local why = record.state == 'gone' and (record.detail or '') ~= '' and ': ' .. record.detail or ''
  event('engine', ARGV[1] .. ' is ' .. record.state .. at .. why)
  redis.call('PUBLISH', k('changes'), 'engine ' .. ARGV[1] .. ' ' .. record.state .. ' ' .. record.version)
end
return {1}
