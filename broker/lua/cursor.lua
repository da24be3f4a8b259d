-- cursor.lua: the trained frontier, for the checkpoint of the step that was recorded last. It names every open prompt, so
-- it is asked for once in each checkpoint, not with each step.
-- KEYS  1 prefix; reads cursor, open
-- ARGV  1 epoch  2 step
-- returns {"cursor", next index, {open prompts...}} | {"version", recorded step} | {"fenced", holder}
if tonumber(ARGV[2]) ~= n('step') then return {'version', policy.step} end
return {'cursor', redis.call('HGET', k('cursor'), 'next_prompt'), redis.call('ZRANGE', k('open'), 0, -1)}
