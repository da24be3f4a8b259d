-- pass_rate.lua: how often samples of a prompt passed of late; a group adds its own, and what was known before fades.
-- KEYS  1 prefix; touches pass_rates (hash: prompt -> passes and samples, faded)
-- ARGV  1 prompt (a name of fixed length)  2 passes  3 samples, 0: only read  4 share of what was known that counts on
-- returns {passes, samples} as text
local seen = redis.call('HGET', k('pass_rates'), ARGV[1])
local passes, samples = string.match(seen or '0 0', '^(%S+) (%S+)$')
if tonumber(ARGV[3]) > 0 then
  passes = string.format('%.6g', passes * ARGV[4] + ARGV[2])
  samples = string.format('%.6g', samples * ARGV[4] + ARGV[3])
  if seen or redis.call('HLEN', k('pass_rates')) < 1000000 then
    redis.call('HSET', k('pass_rates'), ARGV[1], passes .. ' ' .. samples)
  else
    count('pass_rates_dropped')
  end
end
return {passes, samples}
