-- both.lua: the end of a script of two transitions: the second sees what the first did, and is left out if the trainer's
-- first was refused (a submission has an answer for each group: what follows it does so in any case).
-- ARGV  1 how many arguments the first has, then these, then those of the second
-- returns {answer of the first, answer of the second or {}}
local REFUSED = {fenced = true, version = true, ['not-leased'] = true}
local function arguments(from, to)
  local out = {}
  for i = from, to do out[i - from + 1] = ARGV[i] end
  return out
end
local between = tonumber(ARGV[1]) + 1
local answer = first(arguments(2, between))
if REFUSED[answer[1]] then return {answer, {}} end
write()
local answers = {answer, second(arguments(between + 1, #ARGV))}
flush()
return answers
