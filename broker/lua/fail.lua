-- fail.lua: a worker gives a group up (it failed) or back (the worker stops).
-- KEYS  1 prefix; touches ledger, group:<id>, generating, admitted_hist, open, reissue, tries, dead, dead_order, counters
-- ARGV  1 group id  2 worker  3 reason  4 tokens  5 mode: try | dead | again (see close in common.lua), or drop: no
--       gradient, so it is filtered and its prompt done with
-- returns {1} if the worker held the group, else {0}
local rec = group(ARGV[1])
if rec.state ~= 'generating' or rec.worker ~= ARGV[2] then return {0} end
rec.tokens = tonumber(ARGV[4])
tally('issued', 0, rec.tokens)
if ARGV[5] == 'drop' then
  leave(ARGV[1], rec)
  tally('filtered', 1, rec.tokens)
  put(ARGV[1], false)
  index('open', rec.prompt)
  count('groups_filtered_by_workers')
  return {1}
end
close(ARGV[1], rec, 'failed', ARGV[3], ARGV[5])
count(ARGV[5] == 'again' and 'groups_released' or 'groups_failed')
return {1}
