--[[
  Replaces an identity's overrides, with their expiry, in one step: a block must not lapse while it is written again.
  Version  3

  KEYS   the identity's overrides
  ARGV   now, when the last of them ends in ms, then field and value of each; none: there are none any more
]]
-- Never deleted before it is written: on a node that hands its slot over, what is gone cannot be written any more.
if not ARGV[3] then
  call("DEL", KEYS[1])
  return 1
end
local kept = {}
for i = 3, #ARGV, 2 do
  kept[ARGV[i]] = true
end
call("HSET", KEYS[1], unpack(ARGV, 3))
for _, field in ipairs(call("HKEYS", KEYS[1])) do
  if not kept[field] then
    call("HDEL", KEYS[1], field)
  end
end
call("PEXPIRE", KEYS[1], math.max(1, tonumber(ARGV[2]) - now))
return 1
