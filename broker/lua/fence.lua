-- fence.lua: in front of every transition of the trainer: ARGV 1 is its epoch; an older one is told who holds the newer.
if ARGV[1] ~= policy.epoch then return {'fenced', policy.epoch} end
