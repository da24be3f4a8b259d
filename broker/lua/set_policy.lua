-- set_policy.lua: changes one setting of a running run: status or max_lag.
-- KEYS  1 prefix; touches policy, events
-- ARGV  1 field  2 value
-- returns {1}
if policy[ARGV[1]] ~= ARGV[2] then event('policy', ARGV[1] .. ' is ' .. ARGV[2]) end
set({[ARGV[1]] = ARGV[2]})
return {1}
