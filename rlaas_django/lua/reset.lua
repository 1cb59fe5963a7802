--[[
  Forgets an identity under its policies, whichever algorithm counted.
  Version  2

  KEYS   every key that an algorithm may have written, as many for each policy
  ARGV   now, the number of keys per policy, then the window in ms of each policy
  reply  the number of keys that were there

  The fixed window's keys end in the window's index, which only the server's clock tells. The window before and the
  one after are there when the clock stepped.
]]
local each = tonumber(ARGV[2])
local deleted = 0

for i, key in ipairs(KEYS) do
  deleted = deleted + call("DEL", key)
  if (i - 1) % each == 0 then
    local index = math.floor(now / tonumber(ARGV[3 + (i - 1) / each]))
    for neighbour = index - 1, index + 1 do
      deleted = deleted + call("DEL", key .. ":" .. neighbour)
    end
  end
end
return deleted
