-- both.lua: the end of a script of two transitions: the second sees what the first did.
-- ARGV  1 how many arguments the first has, then these, then those of the second
-- returns {answer of the first, answer of the second}
local function arguments(from, to)
  local out = {}
  for i = from, to do out[i - from + 1] = ARGV[i] end
  return out
end
local between = tonumber(ARGV[1]) + 1
local answers = {first(arguments(2, between))}
write()
answers[2] = second(arguments(between + 1, #ARGV))
flush()
return answers
