-- reject.lua: the trainer cannot use a leased group (its payload is missing or corrupt): failed, and a dead letter.
-- KEYS  1 prefix; touches ledger, group:<id>, payload:<id>, leased, open, dead, dead_order, counters
-- ARGV  1 epoch  2 group id  3 reason
-- returns {1} if the group was leased, else {0} | {"fenced", holder}
local rec = group(ARGV[2])
if rec.state ~= 'leased' then return {0} end
close(ARGV[2], rec, 'failed', ARGV[3], 'dead')
count('groups_rejected')
return {1}
