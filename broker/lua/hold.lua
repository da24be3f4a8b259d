-- hold.lua: one process at a time has a role in a run (weight-sync); it renews its hold or loses it.
-- KEYS  1 prefix; touches holder:<role> (string that expires); tells the channel changes when a hold is given up
-- ARGV  1 role  2 holder, unique to a process  3 milliseconds; 0 gives the hold up
-- returns {"held"} if it is the holder's now (0: given up), else {"other", holder, milliseconds that are left}
local key = k('holder:' .. ARGV[1])
local holder = redis.call('GET', key)
if holder and holder ~= ARGV[2] then
  local left = redis.call('PTTL', key)
  if ARGV[3] ~= '0' and left > tonumber(ARGV[3]) then -- the server's clock was set back: no more than a hold from now
    redis.call('SET', key, holder, 'PX', ARGV[3])
    left = tonumber(ARGV[3])
  end
  return {'other', holder, left}
end
if ARGV[3] == '0' then
  redis.call('DEL', key)
  redis.call('PUBLISH', k('changes'), 'free ' .. ARGV[1])
else
  redis.call('SET', key, ARGV[2], 'PX', ARGV[3])
end
return {'held'}
